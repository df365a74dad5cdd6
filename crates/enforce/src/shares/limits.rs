//! Converts shares into the limits of a region.
//!
//! Compute is in thousandths of a percent on both sides.

use partage_core::model::{Bytes, Cores, GpuUuid, Share, TurnPreferences};
use partage_host::gpus::{uuid_bytes, uuid_from_bytes};
use partage_region::protocol::NO_MEMORY_LIMIT;
use partage_region::{GpuShare, WHOLE_GPU};
use std::collections::BTreeSet;

const _: () = assert!(partage_core::model::MAX_GPUS_PER_CONTAINER as usize == partage_region::MAX_GPUS);
// Compute is passed on without a conversion.
const _: () = assert!(Cores::WHOLE.as_millipercent() == WHOLE_GPU);

/// A share names a GPU by something that is not a UUID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not the UUID of a GPU")]
pub struct InvalidGpu(pub GpuUuid);

/// Converts a share into the limits of a region. `context` is the size of a CUDA context on the GPU, `throttled` whether
/// launches wait for turns, `turns` how.
pub fn region_limits(
    share: &Share,
    context: Bytes,
    throttled: bool,
    turns: TurnPreferences,
) -> Result<GpuShare, InvalidGpu> {
    let uuid = uuid_bytes(&share.gpu).ok_or_else(|| InvalidGpu(share.gpu.clone()))?;
    Ok(GpuShare {
        uuid,
        memory: share.memory_bytes.map_or(u64::MAX, |bytes| bytes.0),
        context: context.0,
        cores: share.cores.filter(|_| !share.whole).map_or(0, Cores::as_millipercent),
        ceiling: share.ceiling.or(share.cores).map_or(WHOLE_GPU, Cores::as_millipercent),
        priority: turns.priority,
        waits_for_turns: throttled,
        low_latency: turns.low_latency,
    })
}

/// Converts the limits of a region into a share. Limits do not distinguish a whole GPU from a share without a memory limit:
/// both are a whole GPU here.
pub(super) fn share_of(limits: &GpuShare) -> Share {
    let whole = limits.memory == NO_MEMORY_LIMIT;
    Share {
        gpu: uuid_from_bytes(limits.uuid),
        memory_bytes: (!whole).then_some(Bytes(limits.memory)),
        cores: Cores::millipercent(limits.cores).filter(|_| limits.cores > 0),
        ceiling: Cores::millipercent(limits.ceiling)
            .filter(|_| limits.ceiling > limits.cores && limits.cores > 0),
        whole,
    }
}

/// Returns the GPUs on which launches wait for turns: those with a share that has guaranteed compute. A tenant that has
/// a GPU to itself needs no turns.
pub fn throttled_gpus<'a>(shares: impl IntoIterator<Item = &'a Share>) -> BTreeSet<GpuUuid> {
    let guaranteed = shares.into_iter().filter(|share| share.cores.is_some() && !share.whole);
    guaranteed.map(|share| share.gpu.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(gpu: &str) -> Share {
        Share { gpu: gpu.into(), memory_bytes: None, cores: None, ceiling: None, whole: false }
    }

    const GPU: &str = "GPU-0123abcd-4567-89ef-fedc-ba9876543210";

    #[test]
    fn amounts_are_converted_in_the_same_unit() {
        let plain = region_limits(&share(GPU), Bytes(7), false, TurnPreferences::default()).unwrap();
        assert_eq!((plain.memory, plain.context, plain.cores, plain.ceiling), (u64::MAX, 7, 0, WHOLE_GPU));
        assert_eq!(plain.uuid[..2], [0x01, 0x23]);
        let (thirty, half) = (Cores::percent(30), Cores::percent(50));
        let mut limited = Share { memory_bytes: Some(Bytes(1 << 30)), cores: thirty, ..share(GPU) };
        let region = region_limits(&limited, Bytes::ZERO, true, TurnPreferences::default()).unwrap();
        assert_eq!((region.memory, region.cores, region.ceiling), (1 << 30, 30_000, 30_000));
        assert!(region.waits_for_turns);
        let back = share_of(&region);
        assert_eq!(back, limited, "the limits have everything that a share needs");
        assert!(
            share_of(&region_limits(&share(GPU), Bytes(7), false, TurnPreferences::default()).unwrap()).whole
        );
        limited.ceiling = half;
        assert_eq!(
            region_limits(&limited, Bytes::ZERO, true, TurnPreferences::default()).unwrap().ceiling,
            50_000
        );
        // A tenant that has the GPU to itself needs no guarantee.
        let whole = Share { cores: Cores::percent(100), whole: true, ..share(GPU) };
        let region = region_limits(&whole, Bytes::ZERO, false, TurnPreferences::default()).unwrap();
        assert_eq!((region.cores, region.ceiling), (0, WHOLE_GPU));
        let turns = TurnPreferences { low_latency: true, priority: 4 };
        let region = region_limits(&limited, Bytes::ZERO, true, turns).unwrap();
        assert_eq!((region.low_latency, region.priority, region.cores), (true, 4, 30_000));
        let error =
            region_limits(&share("GPU-1"), Bytes::ZERO, false, TurnPreferences::default()).unwrap_err();
        assert_eq!(error, InvalidGpu("GPU-1".into()));
    }

    #[test]
    fn gpus_with_guaranteed_compute_are_gated() {
        let thirty = Cores::percent(30);
        let shares = [
            share("GPU-1"),
            Share { cores: thirty, ..share("GPU-1") },
            share("GPU-2"),
            Share { cores: thirty, whole: true, ..share("GPU-3") },
        ];
        assert_eq!(throttled_gpus(&shares), BTreeSet::from([GpuUuid::from("GPU-1")]));
        assert_eq!(throttled_gpus(&shares[2..]), BTreeSet::new());
    }
}
