//! Element sizes and valid shapes of arrays.

use crate::cuda::*;

/// Returns the bytes per element, and how many texels per dimension share one element.
fn element(format: CUarray_format, channels: u32) -> Result<(usize, usize), CudaError> {
    let (size, texels, own_channels) = match format {
        CU_AD_FORMAT_UNSIGNED_INT8 | CU_AD_FORMAT_SIGNED_INT8 => (1, 1, 0),
        CU_AD_FORMAT_UNSIGNED_INT16 | CU_AD_FORMAT_SIGNED_INT16 | CU_AD_FORMAT_HALF => (2, 1, 0),
        CU_AD_FORMAT_UNSIGNED_INT32 | CU_AD_FORMAT_SIGNED_INT32 | CU_AD_FORMAT_FLOAT => (4, 1, 0),
        CU_AD_FORMAT_UNORM_INT8X1 | CU_AD_FORMAT_SNORM_INT8X1 => (1, 1, 1),
        CU_AD_FORMAT_UNORM_INT8X2 | CU_AD_FORMAT_SNORM_INT8X2 => (2, 1, 2),
        CU_AD_FORMAT_UNORM_INT8X4 | CU_AD_FORMAT_SNORM_INT8X4 => (4, 1, 4),
        CU_AD_FORMAT_UNORM_INT16X1 | CU_AD_FORMAT_SNORM_INT16X1 => (2, 1, 1),
        CU_AD_FORMAT_UNORM_INT16X2 | CU_AD_FORMAT_SNORM_INT16X2 => (4, 1, 2),
        CU_AD_FORMAT_UNORM_INT16X4 | CU_AD_FORMAT_SNORM_INT16X4 => (8, 1, 4),
        CU_AD_FORMAT_BC1_UNORM | CU_AD_FORMAT_BC1_UNORM_SRGB => (8, 4, 4),
        CU_AD_FORMAT_BC4_UNORM | CU_AD_FORMAT_BC4_SNORM => (8, 4, 1),
        CU_AD_FORMAT_BC5_UNORM | CU_AD_FORMAT_BC5_SNORM => (16, 4, 2),
        CU_AD_FORMAT_BC6H_UF16 | CU_AD_FORMAT_BC6H_SF16 => (16, 4, 3),
        CU_AD_FORMAT_BC2_UNORM
        | CU_AD_FORMAT_BC2_UNORM_SRGB
        | CU_AD_FORMAT_BC3_UNORM
        | CU_AD_FORMAT_BC3_UNORM_SRGB
        | CU_AD_FORMAT_BC7_UNORM
        | CU_AD_FORMAT_BC7_UNORM_SRGB => (16, 4, 4),
        _ => return Err(CudaError::INVALID_VALUE),
    };
    match (own_channels, channels) {
        (0, 1 | 2 | 4) => Ok((size * channels as usize, texels)),
        (own, given) if own != 0 && own == given => Ok((size, texels)),
        _ => Err(CudaError::INVALID_VALUE),
    }
}

const SHAPE_FLAGS: u32 = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP;
const USAGE_FLAGS: u32 = CUDA_ARRAY3D_SURFACE_LDST
    | CUDA_ARRAY3D_TEXTURE_GATHER
    | CUDA_ARRAY3D_DEPTH_TEXTURE
    | CUDA_ARRAY3D_COLOR_ATTACHMENT
    | CUDA_ARRAY3D_VIDEO_ENCODE_DECODE;
const UNSUPPORTED_FLAGS: u32 = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;

/// Largest array dimensions, the same for every architecture since Turing.
const MAX_1D_WIDTH: usize = 131_072;
const MAX_2D_SIZE: [usize; 2] = [131_072, 65_536];
const MAX_3D_SIDE: usize = 16_384;
const MAX_LAYERED_SIDE: usize = 32_768;
const MAX_LAYERS: usize = 2048;
const MAX_CUBE_SIDE: usize = 32_768;
const MAX_CUBE_LAYERS: usize = 2046;

/// Checks that an array of this shape can exist.
pub(super) fn check(descriptor: &CUDA_ARRAY3D_DESCRIPTOR) -> Result<(), CudaError> {
    let &CUDA_ARRAY3D_DESCRIPTOR { Width: width, Height: height, Depth: depth, Flags: flags, .. } =
        descriptor;
    element(descriptor.Format, descriptor.NumChannels)?;
    if flags & UNSUPPORTED_FLAGS != 0 {
        return Err(CudaError::NOT_SUPPORTED);
    }
    let layered = flags & CUDA_ARRAY3D_LAYERED != 0;
    let fits = match (flags & CUDA_ARRAY3D_CUBEMAP != 0, layered) {
        (true, false) => width == height && depth == 6 && width <= MAX_CUBE_SIDE,
        (true, true) => {
            width == height
                && depth > 0
                && depth % 6 == 0
                && depth <= MAX_CUBE_LAYERS
                && width <= MAX_CUBE_SIDE
        }
        (false, true) => {
            depth > 0 && depth <= MAX_LAYERS && width <= MAX_LAYERED_SIDE && height <= MAX_LAYERED_SIDE
        }
        (false, false) => match (height, depth) {
            (0, 0) => width <= MAX_1D_WIDTH,
            (_, 0) => width <= MAX_2D_SIZE[0] && height <= MAX_2D_SIZE[1],
            (0, _) => false,
            _ => width <= MAX_3D_SIDE && height <= MAX_3D_SIDE && depth <= MAX_3D_SIDE,
        },
    };
    if width > 0 && fits && flags & !(SHAPE_FLAGS | USAGE_FLAGS) == 0 {
        Ok(())
    } else {
        Err(CudaError::INVALID_VALUE)
    }
}

/// Returns the bytes per row, rows per plane, and number of planes.
pub(super) fn rows(descriptor: &CUDA_ARRAY3D_DESCRIPTOR) -> Result<(usize, usize, usize), CudaError> {
    let (size, texels) = element(descriptor.Format, descriptor.NumChannels)?;
    let width = descriptor.Width.div_ceil(texels) * size;
    Ok((width, descriptor.Height.max(1).div_ceil(texels), descriptor.Depth.max(1)))
}

/// Returns the size of the whole array in bytes.
pub(super) fn bytes(descriptor: &CUDA_ARRAY3D_DESCRIPTOR) -> Result<usize, CudaError> {
    let (width, height, depth) = rows(descriptor)?;
    let plane = width.checked_mul(height).ok_or(CudaError::OUT_OF_MEMORY)?;
    plane.checked_mul(depth).ok_or(CudaError::OUT_OF_MEMORY)
}

/// Returns the descriptor of a mipmap level: each level halves the dimensions but not the number of layers.
pub(super) fn level(descriptor: &CUDA_ARRAY3D_DESCRIPTOR, level: u32) -> CUDA_ARRAY3D_DESCRIPTOR {
    let half = |side: usize| if side == 0 { 0 } else { (side >> level).max(1) };
    let layers = descriptor.Flags & SHAPE_FLAGS != 0;
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: half(descriptor.Width),
        Height: half(descriptor.Height),
        Depth: if layers { descriptor.Depth } else { half(descriptor.Depth) },
        ..*descriptor
    }
}

/// Returns the number of mipmap levels down to a single element.
pub(super) fn max_levels(descriptor: &CUDA_ARRAY3D_DESCRIPTOR) -> u32 {
    let depth = if descriptor.Flags & SHAPE_FLAGS != 0 { 0 } else { descriptor.Depth };
    descriptor.Width.max(descriptor.Height).max(depth).max(1).ilog2() + 1
}

/// Returns whether surface objects can write to the array.
pub(super) fn is_surface(descriptor: &CUDA_ARRAY3D_DESCRIPTOR) -> bool {
    descriptor.Flags & CUDA_ARRAY3D_SURFACE_LDST != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(sides: [usize; 3], format: u32, channels: u32, flags: u32) -> CUDA_ARRAY3D_DESCRIPTOR {
        let [Width, Height, Depth] = sides;
        CUDA_ARRAY3D_DESCRIPTOR { Width, Height, Depth, Format: format, NumChannels: channels, Flags: flags }
    }

    #[test]
    fn array_byte_size_is_exact() {
        for (sides, format, channels, expected) in [
            ([1, 0, 0], CU_AD_FORMAT_UNSIGNED_INT8, 1, 1),
            ([100, 0, 0], CU_AD_FORMAT_FLOAT, 4, 1600),
            ([64, 64, 0], CU_AD_FORMAT_HALF, 2, 64 * 64 * 4),
            ([10, 20, 30], CU_AD_FORMAT_SIGNED_INT32, 1, 24_000),
            ([10, 10, 0], CU_AD_FORMAT_BC1_UNORM, 4, 3 * 3 * 8),
        ] {
            let descriptor = descriptor(sides, format, channels, 0);
            assert_eq!(check(&descriptor), Ok(()));
            assert_eq!(bytes(&descriptor), Ok(expected));
        }
    }

    #[test]
    fn invalid_array_shapes_are_rejected() {
        let byte = CU_AD_FORMAT_UNSIGNED_INT8;
        for (sides, channels, flags) in [
            ([0, 0, 0], 1, 0),
            ([1, 0, 1], 1, 0),
            ([1, 1, 1], 3, 0),
            ([4, 5, 6], 1, CUDA_ARRAY3D_CUBEMAP),
            ([4, 4, 7], 1, CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_LAYERED),
            ([4, 4, 0], 1, CUDA_ARRAY3D_LAYERED),
            ([MAX_1D_WIDTH + 1, 0, 0], 1, 0),
        ] {
            let wrong = descriptor(sides, byte, channels, flags);
            assert_eq!(check(&wrong), Err(CudaError::INVALID_VALUE), "{sides:?} {channels} {flags}");
        }
        assert_eq!(check(&descriptor([4, 4, 6], byte, 1, CUDA_ARRAY3D_CUBEMAP)), Ok(()));
        let sparse = descriptor([4, 4, 0], byte, 1, CUDA_ARRAY3D_SPARSE);
        assert_eq!(check(&sparse), Err(CudaError::NOT_SUPPORTED));
    }

    #[test]
    fn mipmap_levels_halve_dimensions_but_not_layers() {
        let layers = descriptor([100, 50, 7], CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_LAYERED);
        assert_eq!(max_levels(&layers), 7);
        let third = level(&layers, 2);
        assert_eq!((third.Width, third.Height, third.Depth), (25, 12, 7));
        let last = level(&layers, 6);
        assert_eq!((last.Width, last.Height, last.Depth), (1, 1, 7));
    }
}
