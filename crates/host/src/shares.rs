//! Converts shares into the limits of a region.
//!
//! Compute is in thousandths of a percent on both sides.

use crate::gpus::uuid_bytes;
use partage_core::model::{Bytes, Cores, GpuUuid, Share};
use partage_region::{GpuShare, WHOLE_GPU};
use std::collections::BTreeSet;

const _: () = assert!(partage_core::model::MAX_GPUS_PER_CONTAINER as usize == partage_region::MAX_GPUS);

/// Converts a share into the limits of a region. `context` is what one context takes on its GPU, `gated` whether launches
/// wait for turns.
pub fn region_share(share: &Share, context: Bytes, gated: bool) -> Result<GpuShare, String> {
    let uuid = uuid_bytes(&share.gpu).ok_or_else(|| format!("{} is no UUID of a GPU", share.gpu))?;
    Ok(GpuShare {
        uuid,
        memory: share.memory_bytes.map_or(u64::MAX, |bytes| bytes.0),
        context: context.0,
        cores: share.cores.filter(|_| !share.whole).map_or(0, Cores::as_millipercent),
        ceiling: share.ceiling.or(share.cores).map_or(WHOLE_GPU, Cores::as_millipercent),
        priority: 0,
        gated,
    })
}

/// Returns the GPUs on which launches wait for turns: those with a share that has guaranteed compute. A container that has a
/// GPU to itself needs no turns.
pub fn gated<'a>(shares: impl IntoIterator<Item = &'a Share>) -> BTreeSet<GpuUuid> {
    let promised = shares.into_iter().filter(|share| share.cores.is_some() && !share.whole);
    promised.map(|share| share.gpu.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(gpu: &str) -> Share {
        Share { gpu: gpu.into(), memory_bytes: None, cores: None, ceiling: None, whole: false }
    }

    const GPU: &str = "GPU-0123abcd-4567-89ef-fedc-ba9876543210";

    #[test]
    fn amounts_are_the_regions() {
        assert_eq!(Cores::WHOLE.as_millipercent(), WHOLE_GPU, "both sides count in the same unit");
        let plain = region_share(&share(GPU), Bytes(7), false).unwrap();
        assert_eq!((plain.memory, plain.context, plain.cores, plain.ceiling), (u64::MAX, 7, 0, WHOLE_GPU));
        assert_eq!(plain.uuid[..2], [0x01, 0x23]);
        let (thirty, half) = (Cores::percent(30), Cores::percent(50));
        let mut limited = Share { memory_bytes: Some(Bytes(1 << 30)), cores: thirty, ..share(GPU) };
        let region = region_share(&limited, Bytes::ZERO, true).unwrap();
        assert_eq!((region.memory, region.cores, region.ceiling), (1 << 30, 30_000, 30_000));
        assert!(region.gated);
        limited.ceiling = half;
        assert_eq!(region_share(&limited, Bytes::ZERO, true).unwrap().ceiling, 50_000);
        // Alone on a GPU nothing is promised: nobody could take it.
        let whole = Share { cores: Cores::percent(100), whole: true, ..share(GPU) };
        let region = region_share(&whole, Bytes::ZERO, false).unwrap();
        assert_eq!((region.cores, region.ceiling), (0, WHOLE_GPU));
        let error = region_share(&share("GPU-1"), Bytes::ZERO, false).unwrap_err();
        assert_eq!(error, "GPU-1 is no UUID of a GPU");
    }

    #[test]
    fn turns_are_where_somebody_was_promised_time() {
        let thirty = Cores::percent(30);
        let shares = [
            share("GPU-1"),
            Share { cores: thirty, ..share("GPU-1") },
            share("GPU-2"),
            Share { cores: thirty, whole: true, ..share("GPU-3") },
        ];
        assert_eq!(gated(&shares), BTreeSet::from([GpuUuid::from("GPU-1")]));
        assert_eq!(gated(&shares[2..]), BTreeSet::new());
    }
}
