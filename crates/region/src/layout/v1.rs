//! Layout 1, written by releases before layout 2. Containers that they started may still run with it.
//!
//! Every word lies where layout 2 has it. Layout 1 differs in two things:
//! - `cores` and `ceiling` of a GPU are in hundredths of a percent, not in thousandths.
//! - The header of `limits` has no words `base_gpus` and `generation`: its list of GPUs is the base, and cannot grow.

use crate::protocol::WHOLE_GPU;

/// Thousandths of a percent in one unit of layout 1.
const MILLIPERCENT_PER_UNIT: u32 = 10;

/// The compute of one whole GPU in layout 1.
const WHOLE_GPU_V1: u32 = 10_000;

const _: () = assert!(WHOLE_GPU_V1 * MILLIPERCENT_PER_UNIT == WHOLE_GPU);

/// Converts a word of the file into thousandths of a percent.
pub(super) fn cores_from_word(word: u32) -> u32 {
    word.saturating_mul(MILLIPERCENT_PER_UNIT)
}

/// Converts thousandths of a percent into a word of the file. Fractions of a hundredth are rounded down, but not to
/// zero, which would mean that nothing is guaranteed.
pub(super) fn cores_to_word(cores: u32) -> u32 {
    (cores / MILLIPERCENT_PER_UNIT).max(cores.min(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_convert_to_hundredths_and_never_to_nothing() {
        let words = [0, 1, 9, 10, 19, 12_345, WHOLE_GPU, u32::MAX].map(cores_to_word);
        assert_eq!(words, [0, 1, 1, 1, 1, 1_234, 10_000, 429_496_729]);
        assert_eq!([0, 1, 10_000, u32::MAX].map(cores_from_word), [0, 10, WHOLE_GPU, u32::MAX]);
    }
}
