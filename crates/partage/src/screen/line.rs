//! A line of a table: text of which parts have a style.

use std::fmt::{self, Write as _};

/// How a part of a line looks where there are colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// As everything.
    Plain,
    /// The head of a table.
    Head,
    /// Of less weight.
    Faint,
    /// As it should be.
    Good,
    /// Worth a look.
    Warn,
    /// Not as it should be.
    Bad,
}

impl Style {
    fn code(self) -> &'static str {
        match self {
            Style::Plain => "",
            Style::Head => "\x1b[1m",
            Style::Faint => "\x1b[2m",
            Style::Good => "\x1b[32m",
            Style::Warn => "\x1b[33m",
            Style::Bad => "\x1b[31m",
        }
    }
}

const USUAL: &str = "\x1b[0m";

/// A line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line {
    text: String,
    /// Where a style begins, in bytes; before the first one it is plain.
    styles: Vec<(usize, Style)>,
}

impl Line {
    /// A line of one style.
    pub(crate) fn plain(style: Style, text: fmt::Arguments<'_>) -> Line {
        let mut line = Line::default();
        line.push(style, text);
        line
    }

    /// Goes on with this.
    pub(crate) fn push(&mut self, style: Style, text: fmt::Arguments<'_>) {
        if self.styles.last().map_or(Style::Plain, |&(_, last)| last) != style {
            self.styles.push((self.text.len(), style));
        }
        // A String takes everything.
        let _ = self.text.write_fmt(text);
    }

    /// Goes on with another line.
    pub(crate) fn append(&mut self, other: &Line) {
        let start = self.text.len();
        let last = self.styles.last().map_or(Style::Plain, |&(_, last)| last);
        if other.styles.first().is_none_or(|&(from, _)| from > 0) && last != Style::Plain {
            self.styles.push((start, Style::Plain));
        }
        self.styles.extend(other.styles.iter().map(|&(from, style)| (start + from, style)));
        self.text.push_str(&other.text);
    }

    /// Goes on with so much room.
    pub(crate) fn space(&mut self, columns: usize) {
        // A width that is formatted ends at 65535, and a command line may be longer.
        self.push(Style::Plain, format_args!("{}", " ".repeat(columns)));
    }

    /// Letters in it.
    pub(crate) fn width(&self) -> usize {
        self.text.chars().count()
    }

    /// Cut to so many letters, the last of which then says so.
    pub(crate) fn cut(&mut self, columns: usize) {
        if self.text().chars().count() > columns {
            let end = self.text.char_indices().nth(columns.saturating_sub(1)).map_or(0, |(at, _)| at);
            self.text.truncate(end);
            self.text.push_str(if columns > 0 { "…" } else { "" });
            self.styles.retain(|&(from, _)| from <= end);
        }
    }

    /// Without styles.
    pub(crate) fn text(&self) -> &str {
        self.text.trim_end()
    }

    /// Adds as much of it as fits in so many columns: a line that goes on in the next row could not be drawn over.
    /// Anybody's text may be in it: what is not surely one column wide is shown as `?`.
    pub(crate) fn paint(&self, to: &mut String, columns: usize, colours: bool) {
        self.put(to, columns, colours, |to, letter| {
            to.push(if is_one_column(letter) { letter } else { '?' })
        });
    }

    /// Adds all of it in colours, on a terminal that may break the line. What would move the cursor is shown as `\\u{…}`.
    pub(crate) fn paint_whole(&self, to: &mut String) {
        self.put(to, usize::MAX, true, |to, letter| match crate::output::is_unseen(letter) {
            true => to.extend(letter.escape_unicode()),
            false => to.push(letter),
        });
    }

    fn put(&self, to: &mut String, columns: usize, colours: bool, put: impl Fn(&mut String, char)) {
        let mut styles = self.styles.iter().peekable();
        let mut painted = false;
        for (at, letter) in self.text().char_indices().take(columns) {
            if let Some((_, style)) = styles.next_if(|&&(from, _)| from <= at)
                && colours
            {
                if painted {
                    to.push_str(USUAL);
                }
                painted = *style != Style::Plain;
                to.push_str(style.code());
            }
            put(to, letter);
        }
        if painted {
            to.push_str(USUAL);
        }
    }
}

fn is_one_column(letter: char) -> bool {
    letter == ' '
        || letter.is_ascii_graphic()
        // What our own tables are made of, and letters of names in Latin scripts.
        || matches!(letter, '█' | '▓' | '▒' | '░' | '·' | '⚠' | '≤' | '→' | '…' | '▲' | '▼' | '\u{c0}'..='\u{17f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn painted(line: &Line, columns: usize, colours: bool) -> String {
        let mut text = String::new();
        line.paint(&mut text, columns, colours);
        text
    }

    #[test]
    fn styles_end_where_the_line_is_cut() {
        let mut line = Line::default();
        line.push(Style::Plain, format_args!("ab"));
        line.push(Style::Bad, format_args!("cd"));
        line.push(Style::Bad, format_args!("ef"));
        line.push(Style::Plain, format_args!("gh  "));
        assert_eq!(line.text(), "abcdefgh");
        assert_eq!(painted(&line, 80, false), "abcdefgh");
        assert_eq!(painted(&line, 80, true), "ab\x1b[31mcdef\x1b[0mgh");
        assert_eq!(painted(&line, 3, true), "ab\x1b[31mc\x1b[0m");
        assert_eq!(painted(&line, 2, true), "ab");
    }

    #[test]
    fn lines_are_joined_and_cut_with_their_styles() {
        let mut line = Line::plain(Style::Bad, format_args!("ab"));
        line.append(&Line::plain(Style::Plain, format_args!("cd")));
        line.append(&Line::plain(Style::Good, format_args!("ef")));
        assert_eq!(painted(&line, 80, true), "\x1b[31mab\x1b[0mcd\x1b[32mef\x1b[0m");
        line.cut(6);
        assert_eq!(line.text(), "abcdef");
        line.cut(4);
        assert_eq!(painted(&line, 80, true), "\x1b[31mab\x1b[0mc…");
        line.cut(0);
        assert_eq!(line, Line { text: String::new(), styles: vec![(0, Style::Bad)] });
    }

    #[test]
    fn what_could_move_the_cursor_is_a_question_mark() {
        let line = Line::plain(Style::Plain, format_args!("é\x1b[2J\u{202e}漢\u{301}█"));
        assert_eq!(painted(&line, 80, true), "é?[2J???█");
        let mut whole = String::new();
        line.paint_whole(&mut whole);
        assert_eq!(whole, "é\\u{1b}[2J\\u{202e}漢\u{301}█");
    }
}
