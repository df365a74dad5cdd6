//! Sensor values, all derived from the last complete utilization window, the card's profile and its settings: under
//! load, temperature, clocks and power rise.

use super::arguments::VisibleGpu;
use crate::profile::GpuProfile;
use crate::state::{GpuCounter, GpuSetting, now};

/// Returns the memory utilization for a compute utilization. Simulated kernels access no memory, so this is the ratio
/// of a typical kernel.
pub(super) fn memory_share(thousandths: u64) -> u64 {
    thousandths * 2 / 5
}

/// A clock domain of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClockDomain {
    Graphics,
    Memory,
    Video,
}

/// The sensors of a card at one time.
#[derive(Clone, Copy)]
pub(super) struct SensorReading {
    gpu: VisibleGpu,
    /// Utilization of the last window in whole percent: sensors must not be more precise than utilization itself.
    load: u64,
    /// Whether a process has a context.
    in_use: bool,
    /// Duration of work relative to normal, in thousandths.
    slowness: u64,
}

impl SensorReading {
    pub(super) fn read(gpu: VisibleGpu) -> Self {
        let state = &gpu.session.state;
        let (thousandths, _) = state.utilization(gpu.index);
        let in_use = !state.processes(gpu.index).is_empty();
        let slowness = u64::from(state.slowness(gpu.index));
        Self { gpu, load: 0, in_use, slowness }.with_load(thousandths)
    }

    /// Returns the reading for another utilization of the last window, in thousandths.
    pub(super) fn with_load(self, thousandths: u64) -> Self {
        Self { load: thousandths.min(1000) / 10, in_use: self.in_use || thousandths > 0, ..self }
    }

    fn profile(&self) -> &'static GpuProfile {
        self.gpu.profile()
    }

    /// Returns whether the card is in its lowest performance state.
    pub(super) fn is_idle(&self) -> bool {
        !self.in_use
    }

    pub(super) fn gpu_percent(&self) -> u32 {
        self.load as u32
    }

    pub(super) fn memory_percent(&self) -> u32 {
        memory_share(self.load) as u32
    }

    pub(super) fn performance_state(&self) -> u32 {
        if self.is_idle() { self.profile().idle_state } else { 0 }
    }

    /// Returns the application clock that was set, or the card's default.
    pub(super) fn application_clock(&self, clock: ClockDomain) -> Option<u32> {
        let clocks = &self.profile().clocks;
        let (setting, default) = match clock {
            ClockDomain::Graphics => (GpuSetting::GraphicsClock, clocks.graphics_default),
            ClockDomain::Memory => (GpuSetting::MemoryClock, clocks.memory_max),
            ClockDomain::Video => return None,
        };
        Some(self.gpu.setting(setting).map_or(default, |mhz| mhz as u32))
    }

    pub(super) fn max_clock(&self, clock: ClockDomain) -> u32 {
        let clocks = &self.profile().clocks;
        match clock {
            ClockDomain::Graphics => clocks.graphics_max,
            ClockDomain::Memory => clocks.memory_max,
            ClockDomain::Video => clocks.video_max,
        }
    }

    pub(super) fn clock(&self, clock: ClockDomain) -> u32 {
        let clocks = &self.profile().clocks;
        let free = match clock {
            ClockDomain::Graphics if self.is_idle() => clocks.graphics_idle,
            ClockDomain::Graphics if self.load == 0 => clocks.graphics_default,
            ClockDomain::Graphics => match self.gpu.setting(GpuSetting::GraphicsClock) {
                Some(mhz) => mhz as u32,
                None => clocks.graphics_max,
            },
            ClockDomain::Memory if self.is_idle() => clocks.memory_idle,
            ClockDomain::Memory => self.application_clock(ClockDomain::Memory).unwrap_or(clocks.memory_max),
            ClockDomain::Video if self.is_idle() => clocks.video_idle,
            ClockDomain::Video => clocks.video_max,
        };
        let range = match clock {
            ClockDomain::Graphics => self.locked_range(GpuSetting::LockedGraphics),
            ClockDomain::Memory => self.locked_range(GpuSetting::LockedMemory),
            ClockDomain::Video => None,
        };
        let clamped = range.map_or(free, |(least, most)| free.clamp(least, most.max(least)));
        if clock == ClockDomain::Graphics {
            (u64::from(clamped) * 1000 / self.slowness) as u32
        } else {
            clamped
        }
    }

    /// Returns the minimum and maximum to which a clock is locked.
    pub(super) fn locked_range(&self, setting: GpuSetting) -> Option<(u32, u32)> {
        self.gpu.setting(setting).map(|word| ((word >> 20) as u32 & 0xfffff, word as u32 & 0xfffff))
    }

    pub(super) fn power_limit(&self) -> u32 {
        self.gpu
            .setting(GpuSetting::PowerLimit)
            .map_or(self.profile().power.default_limit, |limit| limit as u32)
    }

    /// Returns the power draw without a power limit, in milliwatts.
    fn unlimited_power(&self) -> u64 {
        let power = &self.profile().power;
        let idle = u64::from(power.idle);
        if self.is_idle() {
            return idle;
        }
        // A context alone keeps the clocks high.
        let awake = idle + idle / 3;
        awake + full_power(self.profile()).saturating_sub(awake) * self.load / 100
    }

    /// Returns the power draw in milliwatts.
    pub(super) fn power(&self) -> u32 {
        self.unlimited_power().min(u64::from(self.power_limit())) as u32
    }

    /// Returns the energy used since the machine booted or the GPU returned, in millijoules. Busy time counts in
    /// tenths of windows, so that energy is not a more precise clock than utilization.
    pub(super) fn energy(&self) -> u64 {
        let state = &self.gpu.session.state;
        let step = (state.window() / 10).max(1);
        let count = |counter| state.counter(self.gpu.index, counter);
        let busy =
            state.service_time(self.gpu.index, state.slot()).1.saturating_sub(count(GpuCounter::BusyBefore));
        let busy = u128::from(busy / step * step);
        let age = u128::from(now().saturating_sub(count(GpuCounter::Returned)));
        let idle = u128::from(self.profile().power.idle);
        let more = u128::from(full_power(self.profile())).saturating_sub(idle);
        // Milliwatts times nanoseconds are picojoules.
        let picojoules = idle * age + more * busy;
        u64::try_from(picojoules / 1_000_000_000).unwrap_or(u64::MAX)
    }

    pub(super) fn temperature(&self) -> u32 {
        let figures = &self.profile().temperature;
        if self.slowness > 1000 {
            // A slow GPU is simulated as thermally throttled.
            return figures.slowdown.saturating_sub(1);
        }
        figures.idle + (u64::from(figures.load.saturating_sub(figures.idle)) * self.load / 100) as u32
    }

    pub(super) fn memory_temperature(&self) -> Option<u32> {
        let most = self.profile().temperature.memory_max?;
        Some((self.temperature() + 2).min(most))
    }

    /// Returns how far the temperature is below the maximum operating temperature.
    pub(super) fn temperature_margin(&self) -> i32 {
        self.profile().temperature.max_operating as i32 - self.temperature() as i32
    }

    /// Returns the current clocks event reasons.
    pub(super) fn reasons(&self) -> u64 {
        let mut reasons = 0;
        if self.is_idle() {
            return super::nvmlClocksEventReasonGpuIdle;
        }
        if self.slowness > 1000 {
            reasons |= super::nvmlClocksEventReasonSwThermalSlowdown;
        }
        if self.unlimited_power() > u64::from(self.power_limit()) {
            reasons |= super::nvmlClocksEventReasonSwPowerCap;
        }
        if self.gpu.setting(GpuSetting::GraphicsClock).is_some()
            || self.locked_range(GpuSetting::LockedGraphics).is_some()
        {
            reasons |= super::nvmlClocksEventReasonApplicationsClocksSetting;
        }
        reasons
    }

    pub(super) fn pcie_generation(&self) -> u32 {
        let pci = &self.profile().pci;
        if self.is_idle() { pci.generation_idle } else { pci.generation }
    }
}

/// Returns the power draw under full load, slightly below the limit.
fn full_power(profile: &GpuProfile) -> u64 {
    u64::from(profile.power.default_limit) * 92 / 100
}

/// Encodes a clock range as the value of a setting.
pub(super) fn pack_clock_range(least: u32, most: u32) -> u64 {
    u64::from(least & 0xfffff) << 20 | u64::from(most & 0xfffff)
}
