//! Splits Rust source into code, comments and string literals.
//!
//! The scanner recognizes line and block comments, string, byte string, raw string and character literals, and lifetimes. That is enough to
//! attribute every letter; it does not parse Rust.

/// A run of comment lines of the same kind, with their markers removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CommentBlock {
    /// Number of its first line, from 1.
    pub(super) line: usize,
    /// Whether it is a doc comment.
    pub(super) is_doc: bool,
    /// The lines without their markers.
    pub(super) text: String,
    marker: &'static str,
    last_line: usize,
}

impl CommentBlock {
    /// Returns the first line of the comment.
    pub(super) fn first_line(&self) -> &str {
        self.text.lines().next().unwrap_or_default()
    }
}

/// The parts of a source file.
#[derive(Debug, Default)]
pub(super) struct RustText {
    /// Comments in order.
    pub(super) comments: Vec<CommentBlock>,
    /// String literals with the numbers of the lines in which they start.
    pub(super) strings: Vec<(usize, String)>,
    /// The source with comments and the content of literals replaced by blanks; line numbers are kept.
    pub(super) code: String,
}

impl RustText {
    /// Scans a source file.
    pub(super) fn parse(source: &str) -> RustText {
        let mut parts = RustText::default();
        let mut scanner = Scanner { rest: source, line: 1 };
        // Whether only white space precedes on the line: comments after code are blocks of their own.
        while let Some(first) = scanner.peek() {
            if scanner.rest.starts_with("//") {
                let line = scanner.line;
                let comment = scanner.take_while(|letter| letter != '\n');
                parts.add_comment(line, comment);
            } else if scanner.rest.starts_with("/*") {
                let (line, comment) = (scanner.line, scanner.block_comment());
                parts.code.extend(comment.chars().filter(|&letter| letter == '\n'));
                parts.comments.push(CommentBlock {
                    line,
                    is_doc: false,
                    text: comment.to_string(),
                    marker: "/*",
                    last_line: scanner.line,
                });
            } else if let Some(literal) = scanner.string_literal() {
                let line = scanner.line - literal.matches('\n').count();
                parts.code.push_str("\"\"");
                parts.code.extend(literal.chars().filter(|&letter| letter == '\n'));
                parts.strings.push((line, literal));
            } else if first == '\'' {
                scanner.character_or_lifetime();
                parts.code.push(' ');
            } else {
                // An identifier is taken whole, so that `r` and `b` inside one do not start a literal.
                let word = scanner.take_while(|letter| letter.is_alphanumeric() || letter == '_');
                if word.is_empty() {
                    scanner.advance(first.len_utf8());
                    parts.code.push(first);
                } else {
                    parts.code.push_str(word);
                }
            }
        }
        parts
    }

    /// Returns the doc comments.
    pub(super) fn docs(&self) -> impl Iterator<Item = &CommentBlock> {
        self.comments.iter().filter(|comment| comment.is_doc)
    }

    fn add_comment(&mut self, line: usize, comment: &str) {
        let marker =
            ["///", "//!", "//"].into_iter().find(|marker| comment.starts_with(marker)).unwrap_or("//");
        let text = comment[marker.len()..].trim();
        if let Some(last) = self.comments.last_mut()
            && last.marker == marker
            && last.last_line + 1 == line
        {
            last.text.push('\n');
            last.text.push_str(text);
            last.last_line = line;
            return;
        }
        let is_doc = marker != "//" && !comment.starts_with("////");
        self.comments.push(CommentBlock { line, is_doc, text: text.to_string(), marker, last_line: line });
    }
}

struct Scanner<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Scanner<'a> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn advance(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }

    fn take_while(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|letter| !belongs(letter)).unwrap_or(self.rest.len());
        self.advance(end)
    }

    /// Takes a block comment; they nest.
    fn block_comment(&mut self) -> &'a str {
        let (mut depth, mut end) = (0usize, 0usize);
        while end < self.rest.len() {
            let here = &self.rest[end..];
            let step = if here.starts_with("/*") {
                depth += 1;
                2
            } else if here.starts_with("*/") {
                depth -= 1;
                2
            } else {
                here.chars().next().map_or(1, char::len_utf8)
            };
            end += step;
            if depth == 0 {
                break;
            }
        }
        self.advance(end)
    }

    /// Takes a string literal of any kind and returns its content, escapes as written, or returns `None` if none starts here.
    fn string_literal(&mut self) -> Option<String> {
        let prefix = ["", "b", "c", "r", "br", "cr"].into_iter().rev().find(|prefix| {
            self.rest.strip_prefix(prefix).is_some_and(|rest| {
                rest.starts_with('"')
                    || (prefix.ends_with('r') && rest.trim_start_matches('#').starts_with('"'))
            })
        })?;
        let is_raw = prefix.ends_with('r');
        let after = &self.rest[prefix.len()..];
        let hashes = if is_raw { after.len() - after.trim_start_matches('#').len() } else { 0 };
        let content = &after[hashes + 1..];
        let closing = format!("\"{}", "#".repeat(hashes));
        let length = if is_raw { content.find(&closing) } else { end_of_escaped(content) };
        let length = length.unwrap_or(content.len());
        let literal = content[..length].to_string();
        let whole = prefix.len() + hashes + 1 + length + closing.len();
        self.advance(whole.min(self.rest.len()));
        Some(literal)
    }

    /// Takes a character literal, or the quote of a lifetime.
    fn character_or_lifetime(&mut self) {
        let after = &self.rest[1..];
        let mut letters = after.char_indices();
        let length = match (letters.next(), letters.next()) {
            (Some((_, '\\')), _) => after[2..].find('\'').map_or(1, |at| at + 4),
            (Some((_, letter)), Some((_, '\''))) => letter.len_utf8() + 2,
            _ => 1,
        };
        self.advance(length.min(self.rest.len()));
    }
}

/// Returns where a literal with escapes ends.
fn end_of_escaped(content: &str) -> Option<usize> {
    let mut is_escaped = false;
    content.char_indices().find_map(|(at, letter)| {
        let ends = letter == '"' && !is_escaped;
        is_escaped = letter == '\\' && !is_escaped;
        ends.then_some(at)
    })
}
