//! Which share was probably meant.

use partage_workstation::report::Report;

/// No name is longer, and comparing is quadratic in it.
const LONGEST: usize = 100;

/// Says that there is no share of this name, and which there are.
pub(in crate::command) fn unknown(name: &str, report: &Report) -> String {
    let no = format!("no share is called {name}");
    if report.waiting.iter().any(|waiting| waiting.name == name) {
        return format!("{name} still waits for its share: see partage ps");
    }
    if report.shares.is_empty() {
        return format!("{no}: there are no shares");
    }
    let near = near(name, report.shares.iter().map(|share| share.name.as_str()));
    match near.as_slice() {
        [] => format!("{no}: partage ps lists those that there are"),
        near => format!("{no}: did you mean {}?", near.join(" or ")),
    }
}

/// The names that are nearest to this one and near enough to be meant: at most three.
fn near<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let name: Vec<char> = name.chars().flat_map(char::to_lowercase).take(LONGEST).collect();
    let distance = |candidate: &str| {
        let candidate: Vec<char> = candidate.chars().flat_map(char::to_lowercase).take(LONGEST).collect();
        // Who types only the beginning means what goes on with it.
        let begins = name.len() >= 2 && candidate.starts_with(&name);
        let edits = if begins { 0 } else { edits(&name, &candidate) };
        (edits <= name.len().max(candidate.len()) / 3).then_some(edits)
    };
    let mut all: Vec<(usize, &str)> =
        names.filter_map(|candidate| distance(candidate).map(|edits| (edits, candidate))).collect();
    all.sort_unstable();
    let best = all.first().map_or(0, |&(edits, _)| edits);
    all.into_iter().filter(|&(edits, _)| edits == best).take(3).map(|(_, name)| name).collect()
}

/// Letters to add, leave out, replace or swap with the next one.
fn edits(a: &[char], b: &[char]) -> usize {
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
    use super::super::super::samples::{report, share};
    use super::*;

    #[test]
    fn a_slip_is_answered_with_what_was_meant() {
        let mut report = report();
        assert_eq!(unknown("trianer", &report), "no share is called trianer: did you mean trainer?");
        assert_eq!(unknown("Trainer", &report), "no share is called Trainer: did you mean trainer?");
        assert_eq!(unknown("note", &report), "no share is called note: did you mean notebook?");
        assert_eq!(
            unknown("zebra", &report),
            "no share is called zebra: partage ps lists those that there are"
        );
        assert_eq!(unknown("late", &report), "late still waits for its share: see partage ps");
        report.shares.push(share("trailer", "ada", &[0], 1, 1));
        assert_eq!(
            unknown("traiter", &report),
            "no share is called traiter: did you mean trailer or trainer?"
        );
        report.shares.clear();
        assert_eq!(unknown("x", &report), "no share is called x: there are no shares");
    }

    #[test]
    fn edits_are_counted() {
        let edits = |a: &str, b: &str| edits(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>());
        for (a, b, count) in
            [("", "", 0), ("", "ab", 2), ("ab", "", 2), ("ab", "ba", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!(edits(a, b), count, "{a} {b}");
        }
    }
}
