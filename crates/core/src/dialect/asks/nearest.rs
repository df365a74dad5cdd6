//! Which known word was probably meant.

/// The known word with the fewest edits from this one; of several, one that only continues it.
pub(super) fn of<'a>(word: &str, known: &[&'a str]) -> &'a str {
    let distance = |candidate: &&str| (edits(word, candidate), !candidate.starts_with(word));
    known.iter().copied().min_by_key(distance).unwrap_or_default()
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
}
