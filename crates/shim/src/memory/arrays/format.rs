//! Computes how many bytes an array takes.

use partage_driver_api::cuda::*;

/// The shape of an array, from its descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayShape {
    sides: [u64; 3],
    format: CUarray_format,
    channels: u32,
    flags: u32,
}

impl From<&CUDA_ARRAY_DESCRIPTOR_v1> for ArrayShape {
    fn from(wanted: &CUDA_ARRAY_DESCRIPTOR_v1) -> Self {
        let sides = [u64::from(wanted.Width), u64::from(wanted.Height), 0];
        Self { sides, format: wanted.Format, channels: wanted.NumChannels, flags: 0 }
    }
}

impl From<&CUDA_ARRAY_DESCRIPTOR> for ArrayShape {
    fn from(wanted: &CUDA_ARRAY_DESCRIPTOR) -> Self {
        let sides = [wanted.Width as u64, wanted.Height as u64, 0];
        Self { sides, format: wanted.Format, channels: wanted.NumChannels, flags: 0 }
    }
}

impl From<&CUDA_ARRAY3D_DESCRIPTOR_v1> for ArrayShape {
    fn from(wanted: &CUDA_ARRAY3D_DESCRIPTOR_v1) -> Self {
        let sides = [wanted.Width, wanted.Height, wanted.Depth].map(u64::from);
        Self { sides, format: wanted.Format, channels: wanted.NumChannels, flags: wanted.Flags }
    }
}

impl From<&CUDA_ARRAY3D_DESCRIPTOR> for ArrayShape {
    fn from(wanted: &CUDA_ARRAY3D_DESCRIPTOR) -> Self {
        let sides = [wanted.Width, wanted.Height, wanted.Depth].map(|side| side as u64);
        Self { sides, format: wanted.Format, channels: wanted.NumChannels, flags: wanted.Flags }
    }
}

/// Returns the bytes of an element, and the number of texels in each direction that share one. No element is larger
/// than 16 bytes, which is assumed for unknown formats.
fn element_size(format: CUarray_format, channels: u32) -> (u64, u64) {
    let channels = u64::from(channels.clamp(1, 4));
    match format {
        CU_AD_FORMAT_UNSIGNED_INT8 | CU_AD_FORMAT_SIGNED_INT8 => (channels, 1),
        CU_AD_FORMAT_UNSIGNED_INT16 | CU_AD_FORMAT_SIGNED_INT16 | CU_AD_FORMAT_HALF => (2 * channels, 1),
        CU_AD_FORMAT_UNSIGNED_INT32 | CU_AD_FORMAT_SIGNED_INT32 | CU_AD_FORMAT_FLOAT => (4 * channels, 1),
        CU_AD_FORMAT_UNORM_INT8X1 | CU_AD_FORMAT_SNORM_INT8X1 => (1, 1),
        CU_AD_FORMAT_UNORM_INT8X2 | CU_AD_FORMAT_SNORM_INT8X2 => (2, 1),
        CU_AD_FORMAT_UNORM_INT16X1 | CU_AD_FORMAT_SNORM_INT16X1 => (2, 1),
        CU_AD_FORMAT_UNORM_INT8X4 | CU_AD_FORMAT_SNORM_INT8X4 => (4, 1),
        CU_AD_FORMAT_UNORM_INT16X2 | CU_AD_FORMAT_SNORM_INT16X2 => (4, 1),
        CU_AD_FORMAT_UNORM_INT16X4 | CU_AD_FORMAT_SNORM_INT16X4 => (8, 1),
        CU_AD_FORMAT_UNORM_INT_101010_2 => (4, 1),
        CU_AD_FORMAT_BC1_UNORM | CU_AD_FORMAT_BC1_UNORM_SRGB => (8, 4),
        CU_AD_FORMAT_BC4_UNORM | CU_AD_FORMAT_BC4_SNORM => (8, 4),
        CU_AD_FORMAT_BC2_UNORM..=CU_AD_FORMAT_BC7_UNORM_SRGB => (16, 4),
        _ => (16, 1),
    }
}

const LAYERED_FLAGS: u32 = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP;
/// Memory is mapped to these arrays later, from handles that are counted themselves.
const DEFERRED_MEMORY_FLAGS: u32 = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;

/// Alignment of mipmap levels in bytes.
const LEVEL_ALIGNMENT: u64 = 512;

impl ArrayShape {
    /// Returns the bytes of all levels; `u64::MAX` if the number overflows.
    pub(super) fn bytes(self, levels: Option<u32>) -> u64 {
        if self.flags & DEFERRED_MEMORY_FLAGS != 0 {
            return 0;
        }
        let Some(levels) = levels else { return self.level(0) };
        let [width, height, depth] = self.sides;
        let depth = if self.flags & LAYERED_FLAGS != 0 { 0 } else { depth };
        let most = width.max(height).max(depth).max(1).ilog2() + 1;
        (0..levels.min(most)).fold(0u64, |sum, level| {
            sum.saturating_add(
                self.level(level).checked_next_multiple_of(LEVEL_ALIGNMENT).unwrap_or(u64::MAX),
            )
        })
    }

    /// Returns the bytes of a level: every side is half that of the previous level, except for layers.
    fn level(self, level: u32) -> u64 {
        let half = |side: u64| (side >> level).max(1);
        let (size, texels) = element_size(self.format, self.channels);
        let [width, height, depth] = self.sides;
        let row = half(width).div_ceil(texels).saturating_mul(size);
        let depth = if self.flags & LAYERED_FLAGS != 0 { depth.max(1) } else { half(depth) };
        row.saturating_mul(half(height).div_ceil(texels)).saturating_mul(depth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn array_bytes_match_the_descriptor() {
        for (sides, format, channels, flags, levels, expected) in [
            ([1, 0, 0], CU_AD_FORMAT_UNSIGNED_INT8, 1, 0, None, 1),
            ([100, 0, 0], CU_AD_FORMAT_FLOAT, 4, 0, None, 1600),
            ([64, 64, 0], CU_AD_FORMAT_HALF, 2, 0, None, 64 * 64 * 4),
            ([10, 20, 30], CU_AD_FORMAT_SIGNED_INT32, 1, 0, None, 24_000),
            ([10, 10, 0], CU_AD_FORMAT_BC1_UNORM, 4, 0, None, 3 * 3 * 8),
            ([16, 16, 6], CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP, None, 16 * 16 * 6 * 4),
            ([64, 64, 0], CU_AD_FORMAT_FLOAT, 1, 0, Some(3), (64 * 64 + 32 * 32 + 16 * 16) * 4),
            // Two layers with at most three levels, the last of them with one element each.
            ([4, 4, 2], CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_LAYERED, Some(9), 3 * 512),
            ([64, 64, 0], CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SPARSE, None, 0),
            ([u64::MAX, u64::MAX, 2], CU_AD_FORMAT_FLOAT, 4, 0, None, u64::MAX),
            ([u64::MAX, 9, 2], CU_AD_FORMAT_FLOAT, 4, 0, Some(u32::MAX), u64::MAX),
        ] {
            let shape = ArrayShape { sides, format, channels, flags };
            assert_eq!(shape.bytes(levels), expected, "{shape:?}");
        }
    }
}
