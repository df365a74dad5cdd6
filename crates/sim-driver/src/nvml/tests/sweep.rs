//! Every function of the table, called with nothing, with a GPU and nothing, and with a GPU and room.

use super::*;
use std::any::type_name;

/// An argument of any kind: the device where one is meant, the buffer where a pointer is, zero otherwise.
fn given<T>(device: nvmlDevice_t, buffer: *mut c_void) -> T {
    let kind = type_name::<T>();
    // SAFETY: arguments are numbers and pointers, of which zero is one.
    let mut value: T = unsafe { std::mem::zeroed() };
    let pointer = if kind == type_name::<nvmlDevice_t>() {
        device.cast()
    } else if kind.starts_with('*') && !kind.contains("_st") {
        buffer
    } else {
        return value;
    };
    // SAFETY: a pointer is a pointer.
    unsafe { std::ptr::from_mut(&mut value).cast::<*mut c_void>().write(pointer) };
    value
}

macro_rules! calls {
    ($($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(twin $twin:ident)?;)*
    })*) => {
        /// Calls all of them, one after the other.
        fn all(
            device: nvmlDevice_t,
            buffer: *mut c_void,
            length: usize,
            mut each: impl FnMut(&str, Result<(), NvmlError>),
        ) {
            $($(
                if !stringify!($name).starts_with("nvmlInit") && stringify!($name) != "nvmlShutdown" {
                    if !buffer.is_null() {
                        // SAFETY: that long.
                        unsafe { buffer.cast::<u8>().write_bytes(0, length) };
                    }
                    // SAFETY: the arguments are null or lead to a buffer that is larger than any structure.
                    each(stringify!($name), check(unsafe { $name($(given::<$type>(device, buffer)),*) }));
                }
            )*)*
        }
    };
}
partage_driver_api::nvml_functions!(calls);

/// Whether it came to nothing that it meant.
fn is_panic(name: &str, answer: Result<(), NvmlError>) -> bool {
    // The machine may not have the processors of the simulated one.
    answer == Err(NvmlError::UNKNOWN) && !name.ends_with("CpuAffinity")
}

#[test]
fn before_init_every_function_says_so() {
    let _bench = closed(&profile::T4, 1, DriverVersion::R550);
    all(NULL, std::ptr::null_mut(), 0, |name, answer| {
        assert_eq!(answer, Err(NvmlError::UNINITIALIZED), "{name}");
    });
}

#[test]
fn nothing_is_written_through_null() {
    let _bench = open(&profile::A100_SXM4_40GB, 2);
    all(NULL, std::ptr::null_mut(), 0, |name, answer| {
        let refusals = [Err(NvmlError::INVALID_ARGUMENT), Err(NvmlError::NOT_SUPPORTED)];
        assert!(refusals.contains(&answer), "{name}: {answer:?}");
    });
    let device = device(0);
    all(device, std::ptr::null_mut(), 0, |name, answer| {
        assert!(!is_panic(name, answer), "{name}");
        let is_question = name.contains("Get") && !name.contains("Handle");
        assert!(answer.is_err() || !is_question, "{name}");
    });
}

#[test]
fn every_card_answers_every_question() {
    for card in Profile::ALL {
        std::thread::spawn(move || {
            let _bench = open(card, 2);
            let mut buffer = vec![0_u64; 32 << 10];
            let device = device(1);
            let mut answered = 0;
            all(device, buffer.as_mut_ptr().cast(), 256 << 10, |name, answer| {
                assert!(!is_panic(name, answer), "{}: {name}", card.model);
                answered += u32::from(answer.is_ok());
            });
            assert!(answered > 100, "{}: {answered}", card.model);
        })
        .join()
        .unwrap();
    }
}

#[test]
fn a_lost_gpu_answers_nothing_that_is_the_cards() {
    let bench = open(&profile::H100_SXM5_80GB, 2);
    let device = device(1);
    bench.other.inject(1, Fault::Lost);
    let mut buffer = vec![0_u64; 32 << 10];
    let known = ["Index", "MinorNumber", "PciInfo", "PciInfo_v2", "PciInfo_v3"];
    all(device, buffer.as_mut_ptr().cast(), 256 << 10, |name, answer| {
        let question = name.strip_prefix("nvmlDeviceGet");
        if question.is_some_and(|question| known.contains(&question)) {
            assert_eq!(answer, Ok(()), "{name}");
        } else if question
            .is_some_and(|question| !question.starts_with("Count") && !question.starts_with("Handle"))
        {
            let refusals = [
                Err(NvmlError::GPU_IS_LOST),
                Err(NvmlError::NOT_SUPPORTED),
                Err(NvmlError::ARGUMENT_VERSION_MISMATCH),
            ];
            assert!(refusals.contains(&answer), "{name}: {answer:?}");
        }
    });
}

#[test]
fn every_field_has_a_value_or_a_reason() {
    for card in Profile::ALL {
        std::thread::spawn(move || {
            let _bench = open(card, 2);
            let device = device(0);
            let mut fields: Vec<nvmlFieldValue_t> = (0..NVML_FI_MAX + 2)
                .map(|fieldId| nvmlFieldValue_t { fieldId, ..Default::default() })
                .collect();
            let count = fields.len() as i32;
            assert_eq!(
                call(|| unsafe { nvmlDeviceGetFieldValues(device, count, fields.as_mut_ptr()) }),
                Ok(())
            );
            for field in &fields {
                let outside = field.fieldId == 0 || field.fieldId >= NVML_FI_MAX;
                let expected: &[nvmlReturn_t] = match outside {
                    true => &[NVML_ERROR_INVALID_ARGUMENT],
                    false => &[NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED],
                };
                assert!(expected.contains(&field.nvmlReturn), "{}: {}", card.model, field.fieldId);
                assert!(field.timestamp > 0);
            }
            let link_count = &fields[NVML_FI_DEV_NVLINK_LINK_COUNT as usize];
            assert_eq!(link_count.nvmlReturn == NVML_SUCCESS, card.nvlink.is_some(), "{}", card.model);
            for wrong in [0, -1] {
                let answer = call(|| unsafe { nvmlDeviceGetFieldValues(device, wrong, fields.as_mut_ptr()) });
                assert_eq!(answer, Err(NvmlError::INVALID_ARGUMENT));
            }
        })
        .join()
        .unwrap();
    }
}
