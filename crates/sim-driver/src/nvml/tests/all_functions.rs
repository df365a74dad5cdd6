//! Calls every function of the table with null arguments, with a GPU and null, and with a GPU and a buffer.

use super::*;
use std::any::type_name;

/// Returns an argument of any type: the device handle, the buffer for other pointers, and zero otherwise.
fn zeroed_argument<T>(device: nvmlDevice_t, buffer: *mut c_void) -> T {
    let kind = type_name::<T>();
    // SAFETY: arguments are integers and pointers, for which zero is valid.
    let mut value: T = unsafe { std::mem::zeroed() };
    let pointer = if kind == type_name::<nvmlDevice_t>() {
        device.cast()
    } else if kind.starts_with('*') && !kind.contains("_st") {
        buffer
    } else {
        return value;
    };
    // SAFETY: `T` is a pointer type.
    unsafe { std::ptr::from_mut(&mut value).cast::<*mut c_void>().write(pointer) };
    value
}

macro_rules! calls {
    ($($(#[$doc:meta])* trait $family:ident {
        $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(twin $twin:ident)?;)*
    })*) => {
        /// Calls all functions in turn.
        fn call_all(
            device: nvmlDevice_t,
            buffer: *mut c_void,
            length: usize,
            mut each: impl FnMut(&str, Result<(), NvmlError>),
        ) {
            $($(
                if !stringify!($name).starts_with("nvmlInit") && stringify!($name) != "nvmlShutdown" {
                    if !buffer.is_null() {
                        // SAFETY: the buffer has `length` bytes.
                        unsafe { buffer.cast::<u8>().write_bytes(0, length) };
                    }
                    // SAFETY: pointers are null or refer to a buffer larger than any structure.
                    each(stringify!($name), check(unsafe { $name($(zeroed_argument::<$type>(device, buffer)),*) }));
                }
            )*)*
        }
    };
}
partage_driver_api::nvml_functions!(calls);

/// Returns whether the function panicked, which is reported as `UNKNOWN`.
fn is_panic(name: &str, result: Result<(), NvmlError>) -> bool {
    // The real machine may not have the simulated CPUs.
    result == Err(NvmlError::UNKNOWN) && !name.ends_with("CpuAffinity")
}

#[test]
fn every_function_before_init_is_uninitialized() {
    let _fixture = unopened_node(&profile::T4, 1, DriverVersion::R550);
    call_all(NULL, std::ptr::null_mut(), 0, |name, result| {
        assert_eq!(result, Err(NvmlError::UNINITIALIZED), "{name}");
    });
}

#[test]
fn null_outputs_are_rejected() {
    let _fixture = opened_node(&profile::A100_SXM4_40GB, 2);
    call_all(NULL, std::ptr::null_mut(), 0, |name, result| {
        let refusals = [Err(NvmlError::INVALID_ARGUMENT), Err(NvmlError::NOT_SUPPORTED)];
        assert!(refusals.contains(&result), "{name}: {result:?}");
    });
    let device = device(0);
    call_all(device, std::ptr::null_mut(), 0, |name, result| {
        assert!(!is_panic(name, result), "{name}");
        let is_question = name.contains("Get") && !name.contains("Handle");
        assert!(result.is_err() || !is_question, "{name}");
    });
}

#[test]
fn every_profile_supports_most_functions() {
    for card in GpuProfile::ALL {
        std::thread::spawn(move || {
            let _fixture = opened_node(card, 2);
            let mut buffer = vec![0_u64; 32 << 10];
            let device = device(1);
            let mut answered = 0;
            call_all(device, buffer.as_mut_ptr().cast(), 256 << 10, |name, result| {
                assert!(!is_panic(name, result), "{}: {name}", card.model);
                answered += u32::from(result.is_ok());
            });
            assert!(answered > 100, "{}: {answered}", card.model);
        })
        .join()
        .unwrap();
    }
}

#[test]
fn lost_gpu_fails_card_queries() {
    let fixture = opened_node(&profile::H100_SXM5_80GB, 2);
    let device = device(1);
    fixture.other.inject(1, GpuFault::Lost);
    let mut buffer = vec![0_u64; 32 << 10];
    let known = ["Index", "MinorNumber", "PciInfo", "PciInfo_v2", "PciInfo_v3"];
    call_all(device, buffer.as_mut_ptr().cast(), 256 << 10, |name, result| {
        let question = name.strip_prefix("nvmlDeviceGet");
        if question.is_some_and(|question| known.contains(&question)) {
            assert_eq!(result, Ok(()), "{name}");
        } else if question
            .is_some_and(|question| !question.starts_with("Count") && !question.starts_with("Handle"))
        {
            let refusals = [
                Err(NvmlError::GPU_IS_LOST),
                Err(NvmlError::NOT_SUPPORTED),
                Err(NvmlError::ARGUMENT_VERSION_MISMATCH),
            ];
            assert!(refusals.contains(&result), "{name}: {result:?}");
        }
    });
}

#[test]
fn every_field_has_a_value_or_an_error() {
    for card in GpuProfile::ALL {
        std::thread::spawn(move || {
            let _fixture = opened_node(card, 2);
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
                let expected: &[nvmlReturn_t] = if outside {
                    &[NVML_ERROR_INVALID_ARGUMENT]
                } else {
                    &[NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED]
                };
                assert!(expected.contains(&field.nvmlReturn), "{}: {}", card.model, field.fieldId);
                assert!(field.timestamp > 0);
            }
            let link_count = &fields[NVML_FI_DEV_NVLINK_LINK_COUNT as usize];
            assert_eq!(link_count.nvmlReturn == NVML_SUCCESS, card.nvlink.is_some(), "{}", card.model);
            for wrong in [0, -1] {
                let result = call(|| unsafe { nvmlDeviceGetFieldValues(device, wrong, fields.as_mut_ptr()) });
                assert_eq!(result, Err(NvmlError::INVALID_ARGUMENT));
            }
        })
        .join()
        .unwrap();
    }
}
