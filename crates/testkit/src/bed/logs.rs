//! What matters of a log.

/// The last `most` lines that complain; where none does, the last that were written.
pub(super) fn cut(log: &str, most: usize) -> String {
    let complaints: Vec<_> = log.lines().filter(|line| complains(line)).collect();
    let (lines, of) = match complaints.is_empty() {
        true => (log.lines().collect::<Vec<_>>(), "lines"),
        false => (complaints, "complaints"),
    };
    let from = lines.len().saturating_sub(most);
    let mut text = match from {
        0 => String::new(),
        earlier => format!("  ({earlier} earlier {of} left out)\n"),
    };
    for line in lines.iter().skip(from) {
        text.push_str("  ");
        // One line of a dump can be a page long.
        text.extend(line.chars().take(400));
        text.push('\n');
    }
    text
}

/// Errors and worse, in the three ways that the cluster's programs write: klog (`E0102 ...`), logrus (`level=error`)
/// and JSON (`"level":"fatal"`); and what comes before a program's end.
fn complains(line: &str) -> bool {
    let mut letters = line.chars();
    let level = letters.next();
    if line.len() > 5 && letters.take(4).all(|letter| letter.is_ascii_digit()) {
        return matches!(level, Some('E' | 'F'));
    }
    let begins = ["panic:", "fatal error:", "Error:", "error:"];
    let signs = [
        "level=error",
        "level=fatal",
        "\"level\":\"error\"",
        "\"level\":\"fatal\"",
        "\"level\":\"panic\"",
        "err=\"",
    ];
    begins.iter().any(|word| line.starts_with(word)) || signs.iter().any(|sign| line.contains(sign))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_come_first() {
        let log = "I0102 all is well\nE0102 10:00 one\nW0102 careful, error: no\nE0102 two\nEvery day\nlevel=error msg=three\n";
        assert_eq!(cut(log, 2), "  (1 earlier complaints left out)\n  E0102 two\n  level=error msg=three\n");
        assert_eq!(cut("a\nb\nc\n", 2), "  (1 earlier lines left out)\n  b\n  c\n");
        assert_eq!(cut("", 2), "");
    }
}
