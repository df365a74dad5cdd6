//! The error for a share name that does not exist, with the names that were probably meant.

use partage_workstation::report::MachineReport;

/// Longer names are compared by their beginning: the comparison is quadratic in the length.
const MAX_COMPARED_CHARS: usize = 100;

/// Returns the error message, with up to three similar names.
pub(super) fn not_found_message(name: &str, report: &MachineReport) -> String {
    let not_found = format!("share {name} not found");
    if report.waiting.iter().any(|waiting| waiting.name == name) {
        return format!("{name} is still queued: see partage ps");
    }
    if report.shares.is_empty() {
        return format!("{not_found}: no shares exist");
    }
    let near = nearest_names(name, report.shares.iter().map(|share| share.name.as_str()));
    match near.as_slice() {
        [] => format!("{not_found}: list shares with partage ps"),
        near => format!("{not_found}: did you mean {}?", near.join(" or ")),
    }
}

/// Returns at most three names with the smallest edit distance, if it is at most a third of the length.
fn nearest_names<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let name: Vec<char> = name.chars().flat_map(char::to_lowercase).take(MAX_COMPARED_CHARS).collect();
    let distance = |candidate: &str| {
        let candidate: Vec<char> =
            candidate.chars().flat_map(char::to_lowercase).take(MAX_COMPARED_CHARS).collect();
        // A prefix of at least two characters counts as a match.
        let begins = name.len() >= 2 && candidate.starts_with(&name);
        let edits = if begins { 0 } else { edit_distance(&name, &candidate) };
        (edits <= name.len().max(candidate.len()) / 3).then_some(edits)
    };
    let mut all: Vec<(usize, &str)> =
        names.filter_map(|candidate| distance(candidate).map(|edits| (edits, candidate))).collect();
    all.sort_unstable();
    let best = all.first().map_or(0, |&(edits, _)| edits);
    all.into_iter().filter(|&(edits, _)| edits == best).take(3).map(|(_, name)| name).collect()
}

/// Returns the number of characters to insert, delete, replace or swap with the next one (optimal string alignment).
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, other) in b.iter().enumerate() {
            let replaced = last[j] + usize::from(letter != other);
            let mut least = replaced.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *letter == b[j - 1] && a[i - 1] == *other {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::super::test_reports::{report, share};
    use super::*;

    #[test]
    fn misspelled_name_error_suggests_similar_names() {
        let mut report = report();
        assert_eq!(not_found_message("trianer", &report), "share trianer not found: did you mean trainer?");
        assert_eq!(not_found_message("Trainer", &report), "share Trainer not found: did you mean trainer?");
        assert_eq!(not_found_message("note", &report), "share note not found: did you mean notebook?");
        assert_eq!(not_found_message("zebra", &report), "share zebra not found: list shares with partage ps");
        assert_eq!(not_found_message("late", &report), "late is still queued: see partage ps");
        report.shares.push(share("trailer", "ada", &[0], 1, 1));
        assert_eq!(
            not_found_message("traiter", &report),
            "share traiter not found: did you mean trailer or trainer?"
        );
        report.shares.clear();
        assert_eq!(not_found_message("x", &report), "share x not found: no shares exist");
    }

    #[test]
    fn edit_distance_counts_swaps_once() {
        let edits =
            |a: &str, b: &str| edit_distance(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>());
        for (a, b, count) in
            [("", "", 0), ("", "ab", 2), ("ab", "", 2), ("ab", "ba", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!(edits(a, b), count, "{a} {b}");
        }
    }
}
