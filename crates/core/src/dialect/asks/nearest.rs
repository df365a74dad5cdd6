//! Which known word was probably meant.

use super::{aws, dialect_of, gpushare, hami, native, vcuda, volcano};

/// No name of ours comes near this length, and comparing is quadratic in it.
const LONGEST: usize = 100;

/// The known word with the fewest edits from this one; of several, one that only continues it.
pub(super) fn of<'a>(word: &str, known: &[&'a str]) -> &'a str {
    let distance = |candidate: &&str| (edits(word, candidate), !candidate.starts_with(word));
    known.iter().copied().min_by_key(distance).unwrap_or_default()
}

/// The resource that one unknown to every dialect was probably meant to be; `None` for what belongs to others.
pub(super) fn meant(resource: &str) -> Option<String> {
    if resource.len() > LONGEST || resource == native::ATTACHABLE {
        return None;
    }
    if let Some(known) = family(resource) {
        return Some(of(resource, known).to_string());
    }
    let lower = resource.to_ascii_lowercase();
    if lower != resource && dialect_of(&lower).is_some() {
        return Some(lower);
    }
    let (domain, name) = lower.rsplit_once('/').unwrap_or(("", &lower));
    let vcuda = [vcuda::CORE, vcuda::MEMORY];
    if name.starts_with("vcuda-") || vcuda.iter().any(|known| alike(name, known)) {
        let domain = if domain.is_empty() { "tencent.com" } else { domain };
        return Some(format!("{domain}/{}", of(name, &vcuda)));
    }
    let all =
        [&native::RESOURCES[..], &gpushare::RESOURCES, &volcano::RESOURCES, &hami::RESOURCES, &[aws::VGPU]];
    let resembling: Vec<&str> =
        all.into_iter().flatten().copied().filter(|known| resembles(domain, name, known)).collect();
    (!resembling.is_empty()).then(|| of(&lower, &resembling).to_string())
}

/// The resources beside which nobody else has any under such a name.
fn family(resource: &str) -> Option<&'static [&'static str]> {
    let starts = |prefix: &str| resource.starts_with(prefix);
    Some(match () {
        () if starts(native::PREFIX) => &native::RESOURCES,
        () if starts("volcano.sh/vgpu") || starts("volcano.sh/gpu-") => &volcano::RESOURCES,
        () if starts("aliyun.com/gpu") => &gpushare::RESOURCES,
        () if starts(aws::VGPU) => &[aws::VGPU],
        () if starts(hami::GPU) => &hami::RESOURCES,
        () => return None,
    })
}

/// Whether a name under a domain is a slip of the pen for a known resource.
fn resembles(domain: &str, name: &str, known: &str) -> bool {
    // Words that others use for other things: only a domain like ours makes them ours.
    const COMMON: [&str; 6] = ["gpu", "vgpu", "memory", "memory-percent", "cores", "gpu-count"];
    let Some((known_domain, known_name)) = known.split_once('/') else { return false };
    if domain == known_domain {
        return alike(name, known_name) || known_name.split('-').any(|word| word == name);
    }
    let within = |inner: &str, outer: &str| outer.strip_suffix(inner).is_some_and(|rest| rest.ends_with('.'));
    let near =
        within(domain, known_domain) || within(known_domain, domain) || within_edits(domain, known_domain, 2);
    // Without a domain there is only Kubernetes' own memory.
    let alone = domain.is_empty() && name != "memory";
    name == known_name && (alone || (near && !domain.is_empty()) || !COMMON.contains(&name))
}

/// Whether two words differ by a slip of the pen.
fn alike(word: &str, known: &str) -> bool {
    within_edits(word, known, if word.len() < 5 { 1 } else { 2 })
}

/// Whether so few edits do. Lengths alone settle most cases, and names are a tenant's in any number.
fn within_edits(from: &str, to: &str, most: usize) -> bool {
    from.chars().count().abs_diff(to.chars().count()) <= most && edits(from, to) <= most
}

/// Characters to insert, remove or replace to get from one word to the other.
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (removed, letter) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = removed + 1;
        for (index, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[index + 1];
            row[index + 1] = replaced.min(row[index] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_edits() {
        assert_eq!(edits("", ""), 0);
        assert_eq!(edits("memory", "memroy"), 2);
        assert_eq!(edits("cores", "core"), 1);
        assert_eq!(of("partage.dev/mem", &["partage.dev/gpu", "partage.dev/memory"]), "partage.dev/memory");
    }

    #[test]
    fn slips_of_the_pen_are_recognised() {
        for (written, known) in [
            ("vcuda-core", "tencent.com/vcuda-core"),
            ("tencent.com/vcuda-cores", "tencent.com/vcuda-core"),
            ("tencent.com/vcuda_memory", "tencent.com/vcuda-memory"),
            ("amazonaws.com/vgpu", "k8s.amazonaws.com/vgpu"),
            ("aliyun.com/mem", "aliyun.com/gpu-mem"),
            ("Partage.dev/gpu", "partage.dev/gpu"),
            ("partage.de/cores", "partage.dev/cores"),
            ("gpu", "nvidia.com/gpu"),
            ("gpu-mem", "aliyun.com/gpu-mem"),
            ("example.com/gpumem", "nvidia.com/gpumem"),
        ] {
            assert_eq!(meant(written).as_deref(), Some(known), "{written}");
        }
    }

    #[test]
    fn what_belongs_to_others_is_left_alone() {
        for foreign in [
            "cpu",
            "memory",
            "pods",
            "storage",
            "ephemeral-storage",
            "hugepages-2Mi",
            "hugepages-1Gi",
            "example.com/fpga",
            "example.com/memory",
            "amd.com/gpu",
            "intel.com/gpu",
            "gpu.intel.com/i915",
            "nvidia.com/hostdev",
            "aliyun.com/eni",
            "volcano.sh/queue",
            "smarter-devices/fuse",
            "vpc.amazonaws.com/pod-eni",
            "attachable-volumes-aws-ebs",
            "partage.dev/attachable",
            "",
            "/",
        ] {
            assert_eq!(meant(foreign), None, "{foreign}");
        }
    }
}
