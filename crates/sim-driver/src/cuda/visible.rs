//! `CUDA_VISIBLE_DEVICES`: which GPUs of the node a program sees, and in which order.

/// Indexes of the GPUs named by the variable, by number or by (the beginning of) their UUID. As the driver does, it stops
/// at the first entry it cannot read, that names no GPU, or that was named before; all of them without the variable.
pub(super) fn devices(variable: Option<&str>, uuids: &[String]) -> Vec<usize> {
    let Some(variable) = variable else { return (0..uuids.len()).collect() };
    let mut shown = Vec::new();
    for entry in variable.split(',').map(str::trim) {
        let Some(gpu) = find(entry, uuids) else { break };
        if shown.contains(&gpu) {
            // A GPU named twice hides all of them.
            return Vec::new();
        }
        shown.push(gpu);
    }
    shown
}

fn find(entry: &str, uuids: &[String]) -> Option<usize> {
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
    fn entries_are_read_as_the_driver_reads_them() {
        let uuids = ["GPU-aa11", "GPU-aa22", "GPU-bb33"].map(String::from);
        let read = |variable| devices(Some(variable), &uuids);
        assert_eq!(devices(None, &uuids), [0, 1, 2]);
        assert_eq!(read("2,0"), [2, 0]);
        assert_eq!(read(" 1 , GPU-bb33"), [1, 2]);
        assert_eq!(read("GPU-bb"), [2]);
        assert_eq!(read("0,-1,1"), [0]);
        assert_eq!(read("0,7,1"), [0]);
        for nothing in ["", "-1", "NoDevFiles", "GPU-aa", "0,0", "1,0,1"] {
            assert!(read(nothing).is_empty(), "{nothing}");
        }
    }
}
