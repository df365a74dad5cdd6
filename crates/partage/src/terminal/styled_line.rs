//! A line of text whose parts have styles.

use std::fmt::{self, Write as _};

/// The style of a part of a line, shown if colors are enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TextStyle {
    /// The terminal's default, without an escape sequence.
    Plain,
    /// Bold, for column titles and keys.
    Heading,
    /// Faint, for secondary text.
    Dim,
    /// Green, for healthy states and bars.
    Good,
    /// Yellow, for what deserves attention.
    Warning,
    /// Red, for failures and errors.
    Error,
}

impl TextStyle {
    fn code(self) -> &'static str {
        match self {
            TextStyle::Plain => "",
            TextStyle::Heading => "\x1b[1m",
            TextStyle::Dim => "\x1b[2m",
            TextStyle::Good => "\x1b[32m",
            TextStyle::Warning => "\x1b[33m",
            TextStyle::Error => "\x1b[31m",
        }
    }
}

const RESET: &str = "\x1b[0m";

/// Text in which styles begin at byte offsets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StyledLine {
    text: String,
    /// Byte offsets at which a style begins; the text before the first is plain.
    styles: Vec<(usize, TextStyle)>,
}

impl StyledLine {
    /// Creates a line of one style.
    pub(crate) fn new(style: TextStyle, text: fmt::Arguments<'_>) -> StyledLine {
        let mut line = StyledLine::default();
        line.push(style, text);
        line
    }

    /// Appends text in a style.
    pub(crate) fn push(&mut self, style: TextStyle, text: fmt::Arguments<'_>) {
        if self.styles.last().map_or(TextStyle::Plain, |&(_, last)| last) != style {
            self.styles.push((self.text.len(), style));
        }
        // Writing to a String cannot fail.
        let _ = self.text.write_fmt(text);
    }

    /// Appends another line with its styles.
    pub(crate) fn append(&mut self, other: &StyledLine) {
        let start = self.text.len();
        let last = self.styles.last().map_or(TextStyle::Plain, |&(_, last)| last);
        if other.styles.first().is_none_or(|&(from, _)| from > 0) && last != TextStyle::Plain {
            self.styles.push((start, TextStyle::Plain));
        }
        self.styles.extend(other.styles.iter().map(|&(from, style)| (start + from, style)));
        self.text.push_str(&other.text);
    }

    /// Appends this many spaces.
    pub(crate) fn space(&mut self, columns: usize) {
        // A formatted width is limited to 65535, and a command line may be longer.
        self.push(TextStyle::Plain, format_args!("{}", " ".repeat(columns)));
    }

    /// Returns the number of characters.
    pub(crate) fn width(&self) -> usize {
        self.text.chars().count()
    }

    /// Truncates to this many characters; the last one becomes an ellipsis.
    pub(crate) fn cut(&mut self, columns: usize) {
        if self.text().chars().count() > columns {
            let end = self.text.char_indices().nth(columns.saturating_sub(1)).map_or(0, |(at, _)| at);
            self.text.truncate(end);
            self.text.push_str(if columns > 0 { "…" } else { "" });
            self.styles.retain(|&(from, _)| from <= end);
        }
    }

    /// Returns the text without styles and trailing spaces.
    pub(crate) fn text(&self) -> &str {
        self.text.trim_end()
    }

    /// Appends as much of the line as fits in this many columns: a line that wraps could not be drawn over. The text may come from
    /// other users: a character that may not be exactly one column wide is shown as `?`.
    pub(crate) fn paint(&self, to: &mut String, columns: usize, colors: bool) {
        self.put(to, columns, colors, |to, letter| to.push(if is_one_column(letter) { letter } else { '?' }));
    }

    /// Appends the whole line in color, for output that may wrap. Invisible characters are escaped as `\\u{…}`.
    pub(crate) fn paint_whole(&self, to: &mut String) {
        self.put(to, usize::MAX, true, |to, letter| {
            if crate::output::is_invisible(letter) {
                to.extend(letter.escape_unicode());
            } else {
                to.push(letter);
            }
        });
    }

    fn put(&self, to: &mut String, columns: usize, colors: bool, put: impl Fn(&mut String, char)) {
        let mut styles = self.styles.iter().peekable();
        let mut painted = false;
        for (at, letter) in self.text().char_indices().take(columns) {
            if let Some((_, style)) = styles.next_if(|&&(from, _)| from <= at)
                && colors
            {
                if painted {
                    to.push_str(RESET);
                }
                painted = *style != TextStyle::Plain;
                to.push_str(style.code());
            }
            put(to, letter);
        }
        if painted {
            to.push_str(RESET);
        }
    }
}

fn is_one_column(letter: char) -> bool {
    letter == ' '
        || letter.is_ascii_graphic()
        // The characters of our own tables, and letters of Latin scripts.
        || matches!(letter, '█' | '▓' | '▒' | '░' | '·' | '⚠' | '≤' | '→' | '…' | '▲' | '▼' | '\u{c0}'..='\u{17f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn painted(line: &StyledLine, columns: usize, colors: bool) -> String {
        let mut text = String::new();
        line.paint(&mut text, columns, colors);
        text
    }

    #[test]
    fn style_ends_where_the_line_is_cut() {
        let mut line = StyledLine::default();
        line.push(TextStyle::Plain, format_args!("ab"));
        line.push(TextStyle::Error, format_args!("cd"));
        line.push(TextStyle::Error, format_args!("ef"));
        line.push(TextStyle::Plain, format_args!("gh  "));
        assert_eq!(line.text(), "abcdefgh");
        assert_eq!(painted(&line, 80, false), "abcdefgh");
        assert_eq!(painted(&line, 80, true), "ab\x1b[31mcdef\x1b[0mgh");
        assert_eq!(painted(&line, 3, true), "ab\x1b[31mc\x1b[0m");
        assert_eq!(painted(&line, 2, true), "ab");
    }

    #[test]
    fn lines_are_joined_and_cut_with_their_styles() {
        let mut line = StyledLine::new(TextStyle::Error, format_args!("ab"));
        line.append(&StyledLine::new(TextStyle::Plain, format_args!("cd")));
        line.append(&StyledLine::new(TextStyle::Good, format_args!("ef")));
        assert_eq!(painted(&line, 80, true), "\x1b[31mab\x1b[0mcd\x1b[32mef\x1b[0m");
        line.cut(6);
        assert_eq!(line.text(), "abcdef");
        line.cut(4);
        assert_eq!(painted(&line, 80, true), "\x1b[31mab\x1b[0mc…");
        line.cut(0);
        assert_eq!(line, StyledLine { text: String::new(), styles: vec![(0, TextStyle::Error)] });
    }

    #[test]
    fn character_of_uncertain_width_is_painted_as_question_mark() {
        let line = StyledLine::new(TextStyle::Plain, format_args!("é\x1b[2J\u{202e}漢\u{301}█"));
        assert_eq!(painted(&line, 80, true), "é?[2J???█");
        let mut whole = String::new();
        line.paint_whole(&mut whole);
        assert_eq!(whole, "é\\u{1b}[2J\\u{202e}漢\u{301}█");
    }
}
