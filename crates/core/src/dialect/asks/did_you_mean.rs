//! Suggestions for misspelled resource and annotation names.

use super::{aws, dialect_of, gpushare, hami, native, vcuda, volcano};

/// Maximum length of names that are compared. Known names are shorter, and comparing takes quadratic time.
const MAX_NAME_LENGTH: usize = 100;

/// Returns the known word with the smallest edit distance. Among equals, a word that starts with this one wins.
pub(super) fn nearest<'a>(word: &str, known: &[&'a str]) -> &'a str {
    let distance = |candidate: &&str| (edit_distance(word, candidate), !candidate.starts_with(word));
    known.iter().copied().min_by_key(distance).unwrap_or_default()
}

/// Returns the resource that an unknown name was probably meant to be; `None` for resources of other projects.
pub(super) fn intended_resource(resource: &str) -> Option<String> {
    if resource.len() > MAX_NAME_LENGTH || resource == native::ATTACHABLE {
        return None;
    }
    if let Some(known) = resources_with_prefix(resource) {
        return Some(nearest(resource, known).to_string());
    }
    let lower = resource.to_ascii_lowercase();
    if lower != resource && dialect_of(&lower).is_some() {
        return Some(lower);
    }
    let (domain, name) = lower.rsplit_once('/').unwrap_or(("", &lower));
    let vcuda = [vcuda::CORE, vcuda::MEMORY];
    if name.starts_with("vcuda-") || vcuda.iter().any(|known| is_similar(name, known)) {
        let domain = if domain.is_empty() { "tencent.com" } else { domain };
        return Some(format!("{domain}/{}", nearest(name, &vcuda)));
    }
    let all =
        [&native::RESOURCES[..], &gpushare::RESOURCES, &volcano::RESOURCES, &hami::RESOURCES, &[aws::VGPU]];
    let resembling: Vec<&str> =
        all.into_iter().flatten().copied().filter(|known| resembles(domain, name, known)).collect();
    (!resembling.is_empty()).then(|| nearest(&lower, &resembling).to_string())
}

/// Returns the known resources under a prefix that no other project uses.
fn resources_with_prefix(resource: &str) -> Option<&'static [&'static str]> {
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

/// Returns whether a domain and name are probably a misspelling of a known resource.
fn resembles(domain: &str, name: &str, known: &str) -> bool {
    // Names that other projects use, too: they count only under a similar domain.
    const COMMON: [&str; 6] = ["gpu", "vgpu", "memory", "memory-percent", "cores", "gpu-count"];
    let Some((known_domain, known_name)) = known.split_once('/') else { return false };
    if domain == known_domain {
        return is_similar(name, known_name) || known_name.split('-').any(|word| word == name);
    }
    let within = |inner: &str, outer: &str| outer.strip_suffix(inner).is_some_and(|rest| rest.ends_with('.'));
    let near =
        within(domain, known_domain) || within(known_domain, domain) || within_edits(domain, known_domain, 2);
    // `memory` without a domain is the Kubernetes resource.
    let alone = domain.is_empty() && name != "memory";
    name == known_name && (alone || (near && !domain.is_empty()) || !COMMON.contains(&name))
}

/// Returns whether two words are within typing-error distance.
fn is_similar(word: &str, known: &str) -> bool {
    within_edits(word, known, if word.len() < 5 { 1 } else { 2 })
}

/// Returns whether the edit distance is at most `max`. Comparing the lengths first is cheap and decides most cases; tenants
/// control the number of names.
fn within_edits(from: &str, to: &str, max: usize) -> bool {
    from.chars().count().abs_diff(to.chars().count()) <= max && edit_distance(from, to) <= max
}

/// Returns the Levenshtein distance between two words.
fn edit_distance(from: &str, to: &str) -> usize {
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
    fn edit_distance_counts_insertions_removals_and_replacements() {
        assert_eq!(edit_distance("", ""), 0);
        assert_eq!(edit_distance("memory", "memroy"), 2);
        assert_eq!(edit_distance("cores", "core"), 1);
        assert_eq!(
            nearest("partage.dev/mem", &["partage.dev/gpu", "partage.dev/memory"]),
            "partage.dev/memory"
        );
    }

    #[test]
    fn misspelled_resources_are_recognized() {
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
            assert_eq!(intended_resource(written).as_deref(), Some(known), "{written}");
        }
    }

    #[test]
    fn resources_of_other_projects_have_no_suggestion() {
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
            assert_eq!(intended_resource(foreign), None, "{foreign}");
        }
    }
}
