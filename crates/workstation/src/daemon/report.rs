//! The daemon's report about all GPUs, shares and waiting requests.

use super::Daemon;
use super::monitor;
use crate::admission::{self, HeldShares};
use crate::report::{
    DaemonReport, DriverReport, GpuReport, GpuShareReport, MachineReport, ProcessReport, ShareReport,
    ShareStage, WaitingReport,
};
use crate::share_store::{HeldElsewhere, ShareRecord};
use crate::users::{self, UserIdentity};
use partage_core::model::{Bytes, Cores, Share};
use partage_enforce::report::GpuStatus;
use partage_host::{process, share_processes};
use partage_region::RegionHandle;
use std::collections::BTreeMap;
use std::sync::Arc;

struct ShareView {
    record: ShareRecord,
    stage: ShareStage,
    /// Absent if the region is unmanaged.
    region: Option<Arc<RegionHandle>>,
}

impl Daemon {
    /// Reports for one user: of other users' commands, the arguments are left out.
    pub(super) fn report_to(self: &Arc<Self>, who: &UserIdentity) -> MachineReport {
        let mut report = self.report();
        for share in report.shares.iter_mut().filter(|share| share.uid != who.uid && !who.is_daemon_user()) {
            share.command.truncate(1);
        }
        report
    }

    /// Reports about all GPUs, shares and waiting requests.
    pub fn report(self: &Arc<Self>) -> MachineReport {
        let mut state = self.state();
        self.release_ended(&mut state);
        let mut shares: Vec<ShareView> = state
            .shares
            .values()
            .map(|live| ShareView {
                record: live.record.clone(),
                stage: live.stage(),
                region: self.regions.region(&live.record.name),
            })
            .collect();
        let elsewhere: Vec<HeldElsewhere> = state.held_elsewhere.values().cloned().collect();
        let warnings = self.warnings();
        let waiting = state
            .queue
            .iter()
            .filter(|ticket| ticket.granted.is_none())
            .map(|ticket| WaitingReport {
                name: ticket.name.clone(),
                user: users::user_name(ticket.who.uid),
                requested: admission::describe_ask(&ticket.ask),
                why: ticket.why.message.clone(),
                since: ticket.since,
            })
            .collect();
        drop(state);
        shares.sort_by(|a, b| (a.record.since, &a.record.name).cmp(&(b.record.since, &b.record.name)));
        MachineReport {
            at: partage_region::clock::monotonic_ns(),
            machine: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            daemon: DaemonReport {
                pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").into(),
                since: self.since,
                foreground: self.foreground,
                metrics: self.metrics.map(|address| address.to_string()),
                warnings,
            },
            driver: DriverReport {
                version: self.machine.gpus.driver_version().into(),
                simulated: self.machine.driver.simulated.is_some(),
            },
            gpus: self.gpus(&shares, &elsewhere),
            shares: self.share_reports(&shares),
            waiting,
        }
    }

    fn warnings(&self) -> Vec<String> {
        self.machine.warnings.iter().cloned().chain(self.warnings.all()).collect()
    }

    fn gpus(&self, shares: &[ShareView], elsewhere: &[HeldElsewhere]) -> Vec<GpuReport> {
        let held: Vec<HeldShares<'_>> = shares
            .iter()
            .map(|ShareView { record, .. }| HeldShares {
                name: &record.name,
                who: &record.who,
                shares: &record.shares,
            })
            .collect();
        let granted = || {
            let elsewhere = elsewhere.iter().flat_map(|held| &held.shares);
            held.iter().flat_map(|held| held.shares).chain(elsewhere)
        };
        let status = GpuStatus::of_node(&self.machine.node, &self.observed(), granted);
        let gpu = |(index, status): (usize, GpuStatus)| {
            let sample = status.sample.as_ref();
            let guaranteed = status.granted_millipercent.min(Cores::WHOLE.as_millipercent());
            GpuReport {
                index: u32::try_from(index).unwrap_or(u32::MAX),
                memory_bytes: status.gpu.memory_bytes,
                granted_memory_bytes: status.granted_memory,
                guaranteed_cores: Cores::millipercent(guaranteed).unwrap_or(Cores::WHOLE),
                reserved_memory_bytes: admission::reserved(
                    &self.machine.node,
                    &held,
                    &self.settings,
                    &status.gpu.uuid,
                ),
                used_memory_bytes: sample.and_then(|sample| sample.memory_used),
                utilization: sample.and_then(|sample| sample.utilization),
                temperature: sample.and_then(|sample| sample.temperature),
                power_milliwatts: sample.and_then(|sample| sample.power_milliwatts),
                unhealthy: status.unhealthy_reason().map(str::to_string),
                unowned_processes: status.unowned_processes,
                uuid: status.gpu.uuid,
                model: status.gpu.model,
            }
        };
        status.into_iter().enumerate().map(gpu).collect()
    }

    fn share_reports(&self, shares: &[ShareView]) -> Vec<ShareReport> {
        // One pass over all processes of the machine for all shares: a pass for each would be slow.
        let memberships: Vec<_> =
            shares.iter().map(|seen| monitor::memberships(&seen.record, &self.state_dir)).collect();
        let counted = share_processes::members_of_shares(&memberships).ok();
        let members = |at: usize| counted.as_ref().map(|counted| counted[at].len());
        shares.iter().enumerate().map(|(at, seen)| self.share(seen, members(at))).collect()
    }

    fn share(&self, seen: &ShareView, members: Option<usize>) -> ShareReport {
        let ShareView { record, stage, region } = seen;
        let usage = region.as_ref().and_then(|region| region.snapshot().ok());
        let gpu_share = |(at, share): (usize, &Share)| {
            let gpu = usage.as_ref().map(|usage| usage.gpus[at]).unwrap_or_default();
            let waits = usage
                .as_ref()
                .is_some_and(|usage| usage.processes.iter().any(|process| process.waiting[at] > 0));
            let index = self.machine.node.gpu_index(&share.gpu).and_then(|index| u32::try_from(index).ok());
            GpuShareReport {
                gpu: index.unwrap_or(u32::MAX),
                uuid: share.gpu.clone(),
                memory_bytes: share.memory_bytes,
                cores: share.cores,
                ceiling: share.ceiling,
                whole: share.whole,
                used_bytes: Bytes(gpu.used),
                peak_bytes: Bytes(gpu.peak),
                refusals: gpu.refusals,
                throttled_nanos: gpu.throttled,
                spent_nanos: gpu.spent,
                waiting: waits,
            }
        };
        let mut processes: BTreeMap<u32, ProcessReport> = BTreeMap::new();
        for used in usage.iter().flat_map(|usage| &usage.processes) {
            let Some(pid) = used.pid_here else { continue };
            // A process that uses both libraries of the driver has two slots.
            let process = processes.entry(pid).or_insert_with(|| ProcessReport {
                pid,
                command: process::command_name(pid).unwrap_or_default(),
                held_bytes: vec![Bytes::ZERO; record.shares.len()],
            });
            for (sum, held) in process.held_bytes.iter_mut().zip(used.held) {
                sum.0 = sum.0.saturating_add(held);
            }
        }
        ShareReport {
            name: record.name.clone(),
            user: users::user_name(record.who.uid),
            uid: record.who.uid,
            stage: *stage,
            since: record.since,
            pid: record.main.pid,
            command: record.command.clone(),
            confinement: record
                .confinement
                .map_or_else(|| "none yet".into(), |record| record.confinement.to_string()),
            cgroup: record.cgroup.is_some(),
            device_filter: record.confinement.is_some_and(|record| record.device_filter),
            members: members.unwrap_or(processes.len()),
            processes: processes.into_values().collect(),
            oversubscribe: record.oversubscribe,
            low_latency: record.turns.low_latency,
            priority: record.turns.priority,
            gpu_shares: record.shares.iter().enumerate().map(gpu_share).collect(),
            bypass_suspected: self.observed().findings.get(&record.name).cloned().unwrap_or_default(),
        }
    }
}
