//! `CUDA_VISIBLE_DEVICES`: which GPUs of the node a program sees, and in which order.

/// Returns the indices of the GPUs that the variable names, by number or by a prefix of their UUID. Like the real
/// driver, stops at the first entry that is invalid or names no GPU. Without the variable, all GPUs are visible.
pub(super) fn parse_visible_devices(variable: Option<&str>, uuids: &[String]) -> Vec<usize> {
    let Some(variable) = variable else { return (0..uuids.len()).collect() };
    let mut visible = Vec::new();
    for entry in variable.split(',').map(str::trim) {
        let Some(gpu) = find_gpu(entry, uuids) else { break };
        if visible.contains(&gpu) {
            // A GPU named twice hides all GPUs.
            return Vec::new();
        }
        visible.push(gpu);
    }
    visible
}

fn find_gpu(entry: &str, uuids: &[String]) -> Option<usize> {
    if entry.starts_with("GPU-") {
        let mut matching = (0..uuids.len()).filter(|&gpu| uuids[gpu].starts_with(entry));
        let first = matching.next()?;
        return matching.next().is_none().then_some(first);
    }
    entry.parse().ok().filter(|&gpu: &usize| gpu < uuids.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_parsed_like_the_real_driver() {
        let uuids = ["GPU-aa11", "GPU-aa22", "GPU-bb33"].map(String::from);
        let read = |variable| parse_visible_devices(Some(variable), &uuids);
        assert_eq!(parse_visible_devices(None, &uuids), [0, 1, 2]);
        assert_eq!(read("2,0"), [2, 0]);
        assert_eq!(read(" 1 , GPU-bb33"), [1, 2]);
        assert_eq!(read("GPU-bb"), [2]);
        assert_eq!(read("0,-1,1"), [0]);
        assert_eq!(read("0,7,1"), [0]);
        for invalid in ["", "-1", "NoDevFiles", "GPU-aa", "0,0", "1,0,1"] {
            assert!(read(invalid).is_empty(), "{invalid}");
        }
    }
}
