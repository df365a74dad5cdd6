//! Where tables go: drawn over each other on a terminal, one after the other elsewhere.

mod keys;
mod line;
mod signals;
mod table;

pub(crate) use line::{Line, Style};
pub(crate) use table::{Column, table};

use keys::Keys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios;
use signals::Signals;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// How tables follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One after the other, whole.
    Stream,
    /// Over each other, below what the terminal shows already; the last one stays.
    Inline,
    /// On a screen of their own, which goes when they end.
    Full,
}

impl Kind {
    /// This kind on a terminal that can move its cursor, and a stream elsewhere.
    pub(crate) fn on_terminal(self) -> Kind {
        if io::stdout().is_terminal() && !is_dumb() { self } else { Kind::Stream }
    }
}

/// Why waiting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The time is over.
    Time,
    /// A key that does not end it.
    Key(char),
    /// The terminal has another size.
    Resized,
    /// Somebody has seen enough: by a key, by a signal, or by not reading any more.
    End,
}

/// Standard output, and the keys of a terminal. What was changed of the terminal is undone when dropped.
///
/// While it is live, signals that end a process only end [`Screen::wait`]: nothing ends before the terminal is as it was.
/// They are not given back to the system afterwards, so a process should end soon after its screen.
pub(crate) struct Screen {
    kind: Kind,
    /// Whether the terminal was asked for a screen of its own.
    entered: bool,
    colours: bool,
    /// Lines of the table that is there.
    drawn: usize,
    tables: usize,
    keys: Option<Keys>,
    struck: VecDeque<char>,
    signals: Option<Signals>,
    /// One frame, so that it is one write.
    frame: String,
}

impl Screen {
    pub(crate) fn open(kind: Kind) -> Screen {
        let live = kind != Kind::Stream;
        let mut screen = Screen {
            kind,
            entered: kind == Kind::Full,
            colours: kind == Kind::Full && colours(),
            drawn: 0,
            tables: 0,
            // Before the terminal is changed, or a signal in between would leave it so.
            signals: live.then(Signals::catch).flatten(),
            keys: None,
            struck: VecDeque::new(),
            frame: String::new(),
        };
        screen.keys = live.then(Keys::take).flatten();
        if screen.entered {
            tell(b"\x1b[?1049h\x1b[?25l");
        }
        screen
    }

    /// One that signals end wherever it goes: for who has something to do afterwards.
    pub(crate) fn waiting(kind: Kind) -> Screen {
        let mut screen = Screen::open(kind);
        screen.signals = screen.signals.take().or_else(Signals::catch);
        screen
    }

    /// Whether tables are drawn over each other.
    pub(crate) fn is_live(&self) -> bool {
        self.kind != Kind::Stream
    }

    /// Rows and columns; a stream has no end in either.
    pub(crate) fn size(&self) -> (usize, usize) {
        if self.is_live() { size() } else { (usize::MAX, usize::MAX) }
    }

    /// Shows a table. The last line is kept where there are too many; `foot` comes below it on a terminal with keys.
    pub(crate) fn show(&mut self, lines: &[Line], foot: &Line, out: &mut dyn Write) -> io::Result<()> {
        self.frame.clear();
        match self.kind {
            Kind::Stream => {
                if self.tables > 0 {
                    writeln!(out)?;
                }
                for line in lines {
                    crate::output::line(out, format_args!("{}", line.text()))?;
                }
            }
            Kind::Inline | Kind::Full => {
                self.draw(lines, foot, size());
                out.write_all(self.frame.as_bytes())?;
            }
        }
        self.tables += 1;
        out.flush()
    }

    /// Puts a frame together.
    fn draw(&mut self, lines: &[Line], foot: &Line, (rows, columns): (usize, usize)) {
        let feet = usize::from(self.keys.is_some());
        // Below an inline table stands the cursor.
        let below = usize::from(self.kind == Kind::Inline);
        let fits = rows.saturating_sub(feet + below).max(1);
        let shown = if lines.len() > fits { fits - 1 } else { lines.len() };
        match self.kind {
            Kind::Full => self.frame.push_str("\x1b[H"),
            // Up to the first line of the last table, and everything below is gone.
            _ if self.drawn > 0 => self.frame.push_str(&format!("\x1b[{}F\x1b[J", self.drawn)),
            _ => {}
        }
        let more = (shown < lines.len())
            .then(|| Line::plain(Style::Faint, format_args!("... {} lines more", lines.len() - shown)));
        let all = lines[..shown].iter().chain(&more).chain((feet > 0).then_some(foot));
        let full = self.kind == Kind::Full;
        self.drawn = 0;
        for line in all {
            if full && self.drawn > 0 {
                self.frame.push_str("\r\n");
            }
            line.paint(&mut self.frame, columns, self.colours);
            // What a longer line left there before is taken away, without a moment of emptiness.
            self.frame.push_str(if full { "\x1b[K" } else { "\n" });
            self.drawn += 1;
        }
        if full {
            self.frame.push_str("\x1b[J");
        }
    }

    /// Waits so long, or until something happens.
    pub(crate) fn wait(&mut self, at_most: Duration) -> Wake {
        let deadline = Instant::now() + at_most;
        loop {
            if let Some(key) = self.struck.pop_front() {
                return if keys::is_end(key) { Wake::End } else { Wake::Key(key) };
            }
            match self.signals.as_mut().map_or(signals::Seen::Nothing, Signals::seen) {
                signals::Seen::Nothing => {}
                signals::Seen::Resized => return Wake::Resized,
                signals::Seen::End => return Wake::End,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.poll(left) {
                Ok(true) => {}
                Ok(false) => return Wake::Time,
                Err(Ended) => return Wake::End,
            }
        }
    }

    /// Whether anything happened in this time.
    fn poll(&mut self, left: Duration) -> Result<bool, Ended> {
        let (stdin, stdout) = (io::stdin(), io::stdout());
        // A reader that leaves is told without being asked for.
        let mut files = vec![PollFd::new(&stdout, PollFlags::empty())];
        files.extend(self.signals.as_ref().map(|signals| PollFd::new(signals.file(), PollFlags::IN)));
        if self.keys.is_some() {
            files.push(PollFd::new(&stdin, PollFlags::IN));
        }
        match poll(&mut files, Some(&timespec(left))) {
            Ok(0) => return Ok(false),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(true),
            Err(_) => return Err(Ended),
        }
        if files[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            return Err(Ended);
        }
        let struck = self.keys.is_some() && files.last().is_some_and(|keys| !keys.revents().is_empty());
        if struck && !keys::read(&mut self.struck) {
            return Err(Ended);
        }
        Ok(true)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.entered {
            tell(b"\x1b[?25h\x1b[?1049l");
        }
    }
}

/// Nothing more can come.
struct Ended;

/// Writes lines once and whole: in colours on a terminal, plain elsewhere.
pub(crate) fn print(lines: &[Line], out: &mut dyn Write) -> io::Result<()> {
    let colours = colours();
    let mut painted = String::new();
    for line in lines {
        if colours {
            line.paint_whole(&mut painted);
            painted.push('\n');
        } else {
            crate::output::line(out, format_args!("{}", line.text()))?;
        }
    }
    out.write_all(painted.as_bytes())
}

/// Whether colours are wanted on standard output.
pub(crate) fn colours() -> bool {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && !plain && !is_dumb()
}

/// Whether the terminal says of itself that it only prints.
fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|term| term == "dumb")
}

/// Whether the terminal can be expected to show more than ASCII.
pub(crate) fn has_blocks() -> bool {
    blocks_in(["LC_ALL", "LC_CTYPE", "LANG"].map(std::env::var_os))
}

/// The first of them that is set decides, as for every program.
fn blocks_in(locale: [Option<OsString>; 3]) -> bool {
    let first = locale.into_iter().flatten().find(|value| !value.is_empty());
    first.is_some_and(|value| {
        let value = value.to_string_lossy().to_ascii_lowercase();
        value.contains("utf-8") || value.contains("utf8")
    })
}

/// Rows and columns, or what terminals usually have.
pub(crate) fn size() -> (usize, usize) {
    match termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
        _ => (24, 80),
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

/// Says something to the terminal itself. A terminal that is gone need not be told.
fn tell(words: &[u8]) {
    let _ = rustix::io::write(io::stdout(), words);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn screen(kind: Kind) -> Screen {
        Screen {
            kind,
            entered: false,
            colours: false,
            drawn: 0,
            tables: 0,
            keys: None,
            struck: VecDeque::new(),
            signals: None,
            frame: String::new(),
        }
    }

    fn table(lines: usize) -> Vec<Line> {
        (0..lines).map(|line| Line::plain(Style::Plain, format_args!("line {line}"))).collect()
    }

    fn frame(screen: &mut Screen, lines: usize, size: (usize, usize)) -> String {
        screen.frame.clear();
        screen.draw(&table(lines), &Line::default(), size);
        screen.frame.clone()
    }

    #[test]
    fn an_inline_table_is_drawn_over_the_last_one() {
        let mut screen = screen(Kind::Inline);
        assert_eq!(frame(&mut screen, 2, (24, 80)), "line 0\nline 1\n");
        assert_eq!(frame(&mut screen, 1, (24, 80)), "\x1b[2F\x1b[Jline 0\n");
        assert_eq!(frame(&mut screen, 9, (4, 5)), "\x1b[1F\x1b[Jline \nline \n... 7\n");
    }

    #[test]
    fn a_full_screen_is_never_scrolled() {
        let mut screen = screen(Kind::Full);
        assert_eq!(frame(&mut screen, 2, (2, 80)), "\x1b[Hline 0\x1b[K\r\nline 1\x1b[K\x1b[J");
        assert_eq!(frame(&mut screen, 3, (2, 80)), "\x1b[Hline 0\x1b[K\r\n... 2 lines more\x1b[K\x1b[J");
        assert_eq!(frame(&mut screen, 3, (1, 80)), "\x1b[H... 3 lines more\x1b[K\x1b[J");
    }

    #[test]
    fn a_stream_is_whole_and_without_escapes() {
        let mut screen = screen(Kind::Stream);
        let mut out = Vec::new();
        let odd = [Line::plain(Style::Bad, format_args!("a\x1b[2Jb"))];
        for _ in 0..2 {
            screen.show(&odd, &Line::default(), &mut out).unwrap();
        }
        assert_eq!(String::from_utf8(out).unwrap(), "a\\u{1b}[2Jb\n\na\\u{1b}[2Jb\n");
    }

    #[test]
    fn the_first_variable_that_is_set_names_the_locale() {
        let blocks = |names: [&str; 3]| blocks_in(names.map(|name| Some(name.into())));
        assert!(blocks(["", "", "de_DE.UTF-8"]) && blocks(["C.utf8", "C", "C"]));
        assert!(!blocks(["C", "en_GB.UTF-8", "en_GB.UTF-8"]) && !blocks_in([None, None, None]));
    }
}
