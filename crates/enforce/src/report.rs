//! The part of a report that both daemons share: the state of each GPU at one moment.

use crate::metrics::GpuMetrics;
use crate::monitor::MonitorReport;
use partage_core::model::{Bytes, Gpu, Node, Share};
use partage_host::gpus::GpuSample;

/// The state of a GPU: its last sample, and the shares granted of it.
#[derive(Clone, Debug)]
pub struct GpuStatus {
    /// The GPU, and why it is withheld.
    pub gpu: Gpu,
    /// The last sample; absent before the first poll.
    pub sample: Option<GpuSample>,
    /// The memory granted to shares.
    pub granted_memory: Bytes,
    /// The compute guaranteed to shares, in thousandths of a percent. It can exceed a whole GPU.
    pub granted_millipercent: u32,
    /// The number of shares granted of it.
    pub shares: usize,
    /// Processes on it that belong to no share.
    pub unowned_processes: Vec<u32>,
}

impl GpuStatus {
    /// Combines the node's GPUs with the last poll and the shares that were granted of them.
    pub fn of_node<'a, K, I>(
        node: &Node,
        observed: &MonitorReport<K>,
        shares: impl Fn() -> I,
    ) -> Vec<GpuStatus>
    where
        I: Iterator<Item = &'a Share>,
    {
        let status = |gpu: &Gpu| {
            let at = observed.samples.iter().position(|sample| sample.uuid == gpu.uuid);
            let mut status = GpuStatus {
                gpu: gpu.clone(),
                sample: at.map(|at| observed.samples[at].clone()),
                granted_memory: Bytes::ZERO,
                granted_millipercent: 0,
                shares: 0,
                unowned_processes: at.and_then(|at| observed.unowned.get(at)).cloned().unwrap_or_default(),
            };
            for share in shares().filter(|share| share.gpu == gpu.uuid) {
                let memory = share.memory_bytes.unwrap_or(Bytes::ZERO);
                let millipercent = share.cores.map_or(0, |cores| cores.as_millipercent());
                status.granted_memory.0 = status.granted_memory.0.saturating_add(memory.0);
                status.granted_millipercent = status.granted_millipercent.saturating_add(millipercent);
                status.shares += 1;
            }
            status
        };
        node.gpus.iter().map(status).collect()
    }

    /// Returns why no shares of the GPU are granted; `None` while it is healthy and not withheld.
    pub fn unhealthy_reason(&self) -> Option<&str> {
        let reported = self.sample.as_ref().and_then(|sample| sample.health.as_deref());
        reported.or(self.gpu.withheld.as_deref())
    }

    /// Returns the metrics of the GPU, with its index.
    pub fn metrics(&self, index: usize) -> GpuMetrics<'_> {
        let sample = self.sample.as_ref();
        GpuMetrics {
            index,
            uuid: &self.gpu.uuid,
            model: &self.gpu.model,
            memory: self.gpu.memory_bytes,
            granted_memory: self.granted_memory,
            used_memory: sample.and_then(|sample| sample.memory_used),
            granted_millipercent: self.granted_millipercent,
            utilization_percent: sample.and_then(|sample| sample.utilization),
            temperature: sample.and_then(|sample| sample.temperature),
            power_milliwatts: sample.and_then(|sample| sample.power_milliwatts),
            healthy: self.unhealthy_reason().is_none(),
            unowned_processes: self.unowned_processes.len(),
            shares: self.shares,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partage_core::model::Cores;

    fn gpu(uuid: &str) -> Gpu {
        Gpu {
            uuid: uuid.into(),
            minor: 0,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(16 << 30),
            numa: None,
            pci: None,
            withheld: None,
        }
    }

    fn sample(uuid: &str, health: Option<&str>) -> GpuSample {
        GpuSample {
            uuid: uuid.into(),
            health: health.map(str::to_string),
            mig: None,
            memory_used: Some(Bytes(5)),
            utilization: Some(70),
            temperature: None,
            power_milliwatts: None,
            processes: Vec::new(),
        }
    }

    #[test]
    fn status_combines_what_is_granted_with_what_is_reported() {
        let node = Node::new("n", vec![gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-c")]);
        let share = |gpu: &str, memory: Option<u64>, cores: u32| Share {
            gpu: gpu.into(),
            memory_bytes: memory.map(Bytes),
            cores: Cores::percent(cores),
            ceiling: None,
            whole: false,
        };
        let shares = [share("GPU-a", Some(3), 80), share("GPU-a", None, 70), share("GPU-b", Some(9), 10)];
        // The monitor lists the GPUs that have ever answered, in its own order.
        let observed: MonitorReport<String> = MonitorReport {
            samples: vec![sample("GPU-b", Some("XID 79")), sample("GPU-a", None)],
            unowned: vec![vec![7], Vec::new()],
            ..MonitorReport::default()
        };
        let status = GpuStatus::of_node(&node, &observed, || shares.iter());
        let granted: Vec<_> =
            status.iter().map(|of| (of.granted_memory.0, of.granted_millipercent, of.shares)).collect();
        assert_eq!(granted, [(3, 150_000, 2), (9, 10_000, 1), (0, 0, 0)]);
        assert_eq!(status[1].unhealthy_reason(), Some("XID 79"));
        assert_eq!((status[1].metrics(1).healthy, status[1].metrics(1).unowned_processes), (false, 1));
        assert_eq!(
            (status[0].metrics(0).healthy, status[0].metrics(0).utilization_percent),
            (true, Some(70))
        );
        assert!(status[2].sample.is_none() && status[2].metrics(2).healthy);
    }
}
