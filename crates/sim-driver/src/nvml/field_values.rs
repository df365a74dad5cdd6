//! Values of `nvmlDeviceGetFieldValues`, by field id.

use super::arguments::{NvmlResult, VisibleGpu};
use super::sensors::SensorReading;
use super::*;
use crate::node::NvLinkEnd;
use crate::profile::Architecture;
use crate::state::now;

/// The value of a field, by type.
enum FieldValue {
    Number(u32),
    Signed(i32),
    Long(u64),
}

/// Fills in the records, each with a value or an error.
///
/// # Safety
/// `values` is null or valid for reads and writes of `count` records.
pub(super) unsafe fn fill(gpu: VisibleGpu, count: i32, values: *mut nvmlFieldValue_t) -> NvmlResult {
    let count = usize::try_from(count).ok().filter(|&count| count > 0).ok_or(NvmlError::INVALID_ARGUMENT)?;
    if values.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let reading = SensorReading::read(gpu);
    for index in 0..count {
        // SAFETY: `index` is below the `count` that the caller guarantees.
        let place = unsafe { values.add(index) };
        // SAFETY: `place` is inside the array.
        let mut record = unsafe { place.read_unaligned() };
        record.timestamp = gpu.session.wall_micros(now()) as i64;
        record.latencyUsec = 0;
        record.nvmlReturn = NVML_SUCCESS;
        match value(gpu, &reading, record.fieldId, record.scopeId) {
            Ok(FieldValue::Number(number)) => {
                record.valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
                record.value.ullVal = u64::from(number);
            }
            Ok(FieldValue::Signed(number)) => {
                record.valueType = NVML_VALUE_TYPE_SIGNED_INT;
                record.value.sllVal = i64::from(number);
            }
            Ok(FieldValue::Long(number)) => {
                record.valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
                record.value.ullVal = number;
            }
            Err(failure) => record.nvmlReturn = failure.code(),
        }
        // SAFETY: `place` is inside the array.
        unsafe { place.write_unaligned(record) };
    }
    Ok(())
}

fn value(gpu: VisibleGpu, reading: &SensorReading, field: u32, scope: u32) -> Result<FieldValue, NvmlError> {
    use FieldValue::{Long, Number, Signed};
    let profile = gpu.profile();
    let temperature = &profile.temperature;
    // Thresholds relative to the maximum operating temperature, as Hopper reports them.
    let margin = |celsius: u32| {
        if profile.architecture >= Architecture::Hopper {
            Ok(Signed(temperature.max_operating as i32 - celsius as i32))
        } else {
            Err(NvmlError::NOT_SUPPORTED)
        }
    };
    // Power of the GPU; modules and memory do not report theirs.
    let power = |milliwatts: u32| match scope {
        NVML_POWER_SCOPE_GPU => Ok(Number(milliwatts)),
        _ => Err(NvmlError::NOT_SUPPORTED),
    };
    Ok(match field {
        NVML_FI_DEV_ECC_CURRENT => Number(ecc::mode(gpu)?.0),
        NVML_FI_DEV_ECC_PENDING => Number(ecc::mode(gpu)?.1),
        NVML_FI_DEV_ECC_SBE_VOL_TOTAL..=NVML_FI_DEV_ECC_DBE_AGG_CBU => Long(errors(gpu, field)?),
        NVML_FI_DEV_RETIRED_SBE => Number(ecc::retired(gpu, 0)?),
        NVML_FI_DEV_RETIRED_DBE => Number(ecc::retired(gpu, 1)?),
        NVML_FI_DEV_RETIRED_PENDING | NVML_FI_DEV_RETIRED_PENDING_SBE | NVML_FI_DEV_RETIRED_PENDING_DBE => {
            ecc::retired(gpu, 0)?;
            Number(0)
        }
        NVML_FI_DEV_REMAPPED_COR => Number(ecc::remapped(gpu)?.0),
        NVML_FI_DEV_REMAPPED_UNC => Number(ecc::remapped(gpu)?.1),
        NVML_FI_DEV_REMAPPED_PENDING | NVML_FI_DEV_REMAPPED_FAILURE => {
            ecc::remapped(gpu)?;
            Number(0)
        }
        NVML_FI_DEV_PERF_POLICY_POWER..=NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS => Long(0),
        NVML_FI_DEV_MEMORY_TEMP => Number(reading.memory_temperature().ok_or(NvmlError::NOT_SUPPORTED)?),
        NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION | NVML_FI_DEV_ENERGY => Long(reading.energy()),
        NVML_FI_DEV_PCIE_REPLAY_COUNTER | NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER => Number(0),
        NVML_FI_DEV_PCIE_L0_TO_RECOVERY_COUNTER
        | NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS..=NVML_FI_DEV_PCIE_COUNT_LANE_ERROR
            if profile.architecture >= Architecture::Hopper =>
        {
            Number(0)
        }
        NVML_FI_DEV_C2C_LINK_COUNT => Number(0),
        NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED => {
            Number(u32::from(profile.architecture >= Architecture::Hopper))
        }
        NVML_FI_DEV_POWER_AVERAGE | NVML_FI_DEV_POWER_INSTANT => power(reading.power())?,
        NVML_FI_DEV_POWER_MIN_LIMIT => power(profile.power.min_limit)?,
        NVML_FI_DEV_POWER_MAX_LIMIT => power(profile.power.max_limit)?,
        NVML_FI_DEV_POWER_DEFAULT_LIMIT => power(profile.power.default_limit)?,
        NVML_FI_DEV_POWER_CURRENT_LIMIT | NVML_FI_DEV_POWER_REQUESTED_LIMIT => power(reading.power_limit())?,
        NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT => margin(temperature.shutdown)?,
        NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT => margin(temperature.slowdown)?,
        NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT | NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT => {
            margin(temperature.max_operating)?
        }
        NVML_FI_DEV_RESET_STATUS | NVML_FI_DEV_DRAIN_AND_RESET_STATUS => Number(0),
        0 | NVML_FI_MAX.. => return Err(NvmlError::INVALID_ARGUMENT),
        _ => return link(gpu, field, scope),
    })
}

/// Returns the value of an ECC error field.
fn errors(gpu: VisibleGpu, field: u32) -> Result<u64, NvmlError> {
    // Error type and counter type; only errors in device memory are simulated.
    let (kind, counter) = match field {
        NVML_FI_DEV_ECC_SBE_VOL_TOTAL | NVML_FI_DEV_ECC_SBE_VOL_DEV => (0, 0),
        NVML_FI_DEV_ECC_DBE_VOL_TOTAL | NVML_FI_DEV_ECC_DBE_VOL_DEV => (1, 0),
        NVML_FI_DEV_ECC_SBE_AGG_TOTAL | NVML_FI_DEV_ECC_SBE_AGG_DEV => (0, 1),
        NVML_FI_DEV_ECC_DBE_AGG_TOTAL | NVML_FI_DEV_ECC_DBE_AGG_DEV => (1, 1),
        _ => return ecc::mode(gpu).map(|_| 0),
    };
    ecc::errors(gpu, kind, counter)
}

/// Returns the value of an NVLink field. Ids come in groups of six links and a total; ids for links 6 to 11 were
/// added later.
fn link(gpu: VisibleGpu, field: u32, scope: u32) -> Result<FieldValue, NvmlError> {
    use FieldValue::{Long, Number};
    let nvlink = gpu.profile().nvlink.as_ref().ok_or(NvmlError::NOT_SUPPORTED);
    let count = gpu.card().gpu.links.len() as u32;
    let connected = |link: u32| if link < count { Ok(link) } else { Err(NvmlError::NOT_SUPPORTED) };
    let speed = || nvlink.map(|nvlink| Number(nvlink.megabytes_per_second));
    Ok(match field {
        NVML_FI_DEV_NVLINK_LINK_COUNT => {
            // Unconnected links are counted too.
            Number(nvlink?.links)
        }
        NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0..=NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL => {
            let place = (field - NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0) % 7;
            if place == 6 {
                connected(0)?
            } else {
                connected(place)?
            };
            Long(0)
        }
        NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L6..=NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L11 => {
            connected(6 + (field - NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L6) % 6)?;
            Long(0)
        }
        NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_L0..=NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_L11 => {
            connected(field - NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_L0)?;
            Long(0)
        }
        NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL => {
            connected(0)?;
            Long(0)
        }
        NVML_FI_DEV_NVLINK_SPEED_MBPS_L0..=NVML_FI_DEV_NVLINK_SPEED_MBPS_L5 => {
            connected(field - NVML_FI_DEV_NVLINK_SPEED_MBPS_L0)?;
            speed()?
        }
        NVML_FI_DEV_NVLINK_SPEED_MBPS_L6..=NVML_FI_DEV_NVLINK_SPEED_MBPS_L11 => {
            connected(6 + field - NVML_FI_DEV_NVLINK_SPEED_MBPS_L6)?;
            speed()?
        }
        NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON => speed()?,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX..=NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX => {
            // Without a link number, all links together.
            if scope == u32::MAX {
                connected(0)?
            } else {
                connected(scope)?
            };
            Long(0)
        }
        NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID => match gpu.card().gpu.links[connected(scope)? as usize] {
            NvLinkEnd::Gpu { link, .. } => Number(link as u32),
            // NVSwitches do not expose their ports: any number will do.
            NvLinkEnd::Switch(_) => Number(scope),
        },
        NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT => {
            let switched = |end: &&NvLinkEnd| matches!(end, NvLinkEnd::Switch(_));
            nvlink?;
            Number(gpu.card().gpu.links.iter().filter(switched).count() as u32)
        }
        NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY..=NVML_FI_DEV_NVLINK_ERROR_DL_CRC => {
            connected(scope)?;
            Long(0)
        }
        NVML_FI_DEV_NVLINK_GET_SPEED => {
            connected(scope)?;
            speed()?
        }
        NVML_FI_DEV_NVLINK_GET_STATE => {
            nvlinks::check_link_exists(gpu, scope)?;
            Number(if connected(scope).is_ok() {
                NVML_NVLINK_STATE_ACTIVE
            } else {
                NVML_NVLINK_STATE_INACTIVE
            })
        }
        NVML_FI_DEV_NVLINK_GET_VERSION => {
            connected(scope)?;
            Number(nvlink?.version)
        }
        _ => return Err(NvmlError::NOT_SUPPORTED),
    })
}
