//! What a card's sensors say. All of it follows from the last whole window of utilisation, the card's figures
//! and what was set on it: a card that works is warm, fast and hungry.

use super::call::Gpu;
use crate::profile::Profile;
use crate::state::{Counter, Setting, now};

/// The part of the time during which memory was read or written, for a card that computed so long. A
/// simulated kernel touches nothing, so this is what a common one would do.
pub(super) fn memory_share(thousandths: u64) -> u64 {
    thousandths * 2 / 5
}

/// A clock that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clock {
    Graphics,
    Memory,
    Video,
}

/// One look at a card.
#[derive(Clone, Copy)]
pub(super) struct Reading {
    gpu: Gpu,
    /// Whole percents of the last window: sensors tell nothing finer than utilisation itself.
    load: u64,
    /// Whether a process has a context.
    in_use: bool,
    /// Thousandths of the usual time that work takes.
    slowness: u64,
}

impl Reading {
    pub(super) fn of(gpu: Gpu) -> Self {
        let state = &gpu.session.state;
        let (thousandths, _) = state.utilisation(gpu.index);
        let in_use = !state.processes(gpu.index).is_empty();
        let slowness = u64::from(state.slowness(gpu.index));
        Self { gpu, load: 0, in_use, slowness }.with_load(thousandths)
    }

    /// The same, had so many thousandths of the last window been used.
    pub(super) fn with_load(self, thousandths: u64) -> Self {
        Self { load: thousandths.min(1000) / 10, in_use: self.in_use || thousandths > 0, ..self }
    }

    fn profile(&self) -> &'static Profile {
        self.gpu.profile()
    }

    /// Whether it rests in its lowest state.
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

    /// What the application asked for, or the card's own.
    pub(super) fn application_clock(&self, clock: Clock) -> Option<u32> {
        let clocks = &self.profile().clocks;
        let (setting, default) = match clock {
            Clock::Graphics => (Setting::GraphicsClock, clocks.graphics_default),
            Clock::Memory => (Setting::MemoryClock, clocks.memory_max),
            Clock::Video => return None,
        };
        Some(self.gpu.setting(setting).map_or(default, |mhz| mhz as u32))
    }

    pub(super) fn max_clock(&self, clock: Clock) -> u32 {
        let clocks = &self.profile().clocks;
        match clock {
            Clock::Graphics => clocks.graphics_max,
            Clock::Memory => clocks.memory_max,
            Clock::Video => clocks.video_max,
        }
    }

    pub(super) fn clock(&self, clock: Clock) -> u32 {
        let clocks = &self.profile().clocks;
        let free = match clock {
            Clock::Graphics if self.is_idle() => clocks.graphics_idle,
            Clock::Graphics if self.load == 0 => clocks.graphics_default,
            Clock::Graphics => match self.gpu.setting(Setting::GraphicsClock) {
                Some(mhz) => mhz as u32,
                None => clocks.graphics_max,
            },
            Clock::Memory if self.is_idle() => clocks.memory_idle,
            Clock::Memory => self.application_clock(Clock::Memory).unwrap_or(clocks.memory_max),
            Clock::Video if self.is_idle() => clocks.video_idle,
            Clock::Video => clocks.video_max,
        };
        let locked = match clock {
            Clock::Graphics => self.locked(Setting::LockedGraphics),
            Clock::Memory => self.locked(Setting::LockedMemory),
            Clock::Video => None,
        };
        let kept = locked.map_or(free, |(least, most)| free.clamp(least, most.max(least)));
        if clock == Clock::Graphics { (u64::from(kept) * 1000 / self.slowness) as u32 } else { kept }
    }

    /// The bounds that clocks were locked into.
    pub(super) fn locked(&self, setting: Setting) -> Option<(u32, u32)> {
        self.gpu.setting(setting).map(|word| ((word >> 20) as u32 & 0xfffff, word as u32 & 0xfffff))
    }

    pub(super) fn power_limit(&self) -> u32 {
        self.gpu.setting(Setting::PowerLimit).map_or(self.profile().power.default_limit, |limit| limit as u32)
    }

    /// What it would draw without a limit.
    fn hunger(&self) -> u64 {
        let power = &self.profile().power;
        let idle = u64::from(power.idle);
        if self.is_idle() {
            return idle;
        }
        // A context alone keeps the clocks up.
        let awake = idle + idle / 3;
        awake + full_power(self.profile()).saturating_sub(awake) * self.load / 100
    }

    /// What it draws, in milliwatts.
    pub(super) fn power(&self) -> u32 {
        self.hunger().min(u64::from(self.power_limit())) as u32
    }

    /// What it has drawn since the machine was started or it came back to the bus, in millijoules. Tenths of windows are the
    /// least that is counted: the energy must not be a better clock than utilisation.
    pub(super) fn energy(&self) -> u64 {
        let state = &self.gpu.session.state;
        let step = (state.window() / 10).max(1);
        let count = |counter| state.counter(self.gpu.index, counter);
        let busy = state.service(self.gpu.index, state.slot()).1.saturating_sub(count(Counter::BusyBefore));
        let busy = u128::from(busy / step * step);
        let age = u128::from(now().saturating_sub(count(Counter::Returned)));
        let idle = u128::from(self.profile().power.idle);
        let more = u128::from(full_power(self.profile())).saturating_sub(idle);
        // Milliwatts times nanoseconds are picojoules.
        let picojoules = idle * age + more * busy;
        u64::try_from(picojoules / 1_000_000_000).unwrap_or(u64::MAX)
    }

    pub(super) fn temperature(&self) -> u32 {
        let figures = &self.profile().temperature;
        if self.slowness > 1000 {
            // What is slow here is slow because it is too warm.
            return figures.slowdown.saturating_sub(1);
        }
        figures.idle + (u64::from(figures.load.saturating_sub(figures.idle)) * self.load / 100) as u32
    }

    pub(super) fn memory_temperature(&self) -> Option<u32> {
        let most = self.profile().temperature.memory_max?;
        Some((self.temperature() + 2).min(most))
    }

    /// How much warmer it may get before it slows down.
    pub(super) fn margin(&self) -> i32 {
        self.profile().temperature.max_operating as i32 - self.temperature() as i32
    }

    /// Why its clocks are what they are, as NVML's bits.
    pub(super) fn reasons(&self) -> u64 {
        let mut reasons = 0;
        if self.is_idle() {
            return super::nvmlClocksEventReasonGpuIdle;
        }
        if self.slowness > 1000 {
            reasons |= super::nvmlClocksEventReasonSwThermalSlowdown;
        }
        if self.hunger() > u64::from(self.power_limit()) {
            reasons |= super::nvmlClocksEventReasonSwPowerCap;
        }
        if self.gpu.setting(Setting::GraphicsClock).is_some()
            || self.locked(Setting::LockedGraphics).is_some()
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

/// What a card draws under full load: nearly what it may.
fn full_power(profile: &Profile) -> u64 {
    u64::from(profile.power.default_limit) * 92 / 100
}

/// Bounds as they are kept in a setting.
pub(super) fn lock(least: u32, most: u32) -> u64 {
    u64::from(least & 0xfffff) << 20 | u64::from(most & 0xfffff)
}
