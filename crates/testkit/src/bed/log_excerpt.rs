//! Extracts the relevant lines of a log.

/// Returns the last `most` error lines, or the last lines if there are no errors.
pub(super) fn excerpt(log: &str, most: usize) -> String {
    let errors: Vec<_> = log.lines().filter(|line| is_error_line(line)).collect();
    let (lines, of) =
        if errors.is_empty() { (log.lines().collect::<Vec<_>>(), "lines") } else { (errors, "errors") };
    let from = lines.len().saturating_sub(most);
    let mut text = match from {
        0 => String::new(),
        earlier => format!("  ({earlier} earlier {of} omitted)\n"),
    };
    for line in lines.iter().skip(from) {
        text.push_str("  ");
        // One line of a dump can be a page long.
        text.extend(line.chars().take(400));
        text.push('\n');
    }
    text
}

/// Returns whether a line is an error, in the formats of the cluster's programs: klog (`E0102 ...`), logrus
/// (`level=error`), JSON (`"level":"fatal"`), and the messages of a Go program that crashes.
fn is_error_line(line: &str) -> bool {
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
    fn error_lines_are_preferred_and_earlier_ones_counted() {
        let log = "I0102 all is well\nE0102 10:00 one\nW0102 careful, error: no\nE0102 two\nEvery day\nlevel=error msg=three\n";
        assert_eq!(excerpt(log, 2), "  (1 earlier errors omitted)\n  E0102 two\n  level=error msg=three\n");
        assert_eq!(excerpt("a\nb\nc\n", 2), "  (1 earlier lines omitted)\n  b\n  c\n");
        assert_eq!(excerpt("", 2), "");
    }
}
