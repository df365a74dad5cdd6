//! Live tables on a terminal, and plain lines everywhere else.
//!
//! Hand-written rather than built on ratatui and crossterm: one `poll` must wait for keys, signals and the reader of standard output
//! at once, which crossterm's event source cannot, and pipes, `partage ps` and the inline table need lines of unbounded width and
//! varying height instead of a fixed cell buffer; ratatui would replace only the drawing of a full screen, about 100 lines.

mod raw_keyboard;
mod signals;
mod styled_line;
mod table;

pub(crate) use styled_line::{StyledLine, TextStyle};
pub(crate) use table::{TableColumn, layout_table};

use raw_keyboard::RawKeyboard;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios;
use signals::{PendingSignal, SignalWatcher};
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// How successive tables are displayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DisplayMode {
    /// Every table is appended, whole, without escape sequences.
    Stream,
    /// Every table replaces the one before, below what the terminal already shows; the last one stays.
    Inline,
    /// Tables are drawn on the alternate screen, which is left at the end.
    FullScreen,
}

impl DisplayMode {
    /// Returns this mode if standard output is a terminal that can move its cursor, else [`DisplayMode::Stream`].
    pub(crate) fn on_terminal(self) -> DisplayMode {
        if can_move_cursor(&io::stdout()) { self } else { DisplayMode::Stream }
    }
}

/// The reason why [`LiveDisplay::wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WakeReason {
    /// The timeout expired before anything else happened.
    Timeout,
    /// A key was pressed that does not quit.
    Key(char),
    /// The terminal was resized.
    Resized,
    /// The user quit: with a key, with a signal, or by closing the reading end of standard output.
    Quit,
}

/// Draws tables on standard output and reads keys. Restores the terminal when dropped.
///
/// While it is live, terminating signals only end [`LiveDisplay::wait`], so that the terminal is restored before the process exits.
/// The default signal actions are not restored afterwards: the process should exit soon after it drops its display.
pub(crate) struct LiveDisplay {
    mode: DisplayMode,
    /// Whether the terminal was switched to the alternate screen.
    entered: bool,
    colors: bool,
    /// Number of lines of the last table that was drawn.
    drawn: usize,
    tables: usize,
    keyboard: Option<RawKeyboard>,
    pressed_keys: VecDeque<char>,
    signals: Option<SignalWatcher>,
    /// One whole frame, so that it is sent with one write.
    frame: String,
}

impl LiveDisplay {
    pub(crate) fn open(mode: DisplayMode) -> LiveDisplay {
        let live = mode != DisplayMode::Stream;
        let mut display = LiveDisplay {
            mode,
            entered: mode == DisplayMode::FullScreen,
            colors: mode == DisplayMode::FullScreen && wants_color(&io::stdout()),
            drawn: 0,
            tables: 0,
            // Installed before the terminal is changed: a signal in between would leave it changed.
            signals: live.then(SignalWatcher::install).flatten(),
            keyboard: None,
            pressed_keys: VecDeque::new(),
            frame: String::new(),
        };
        display.keyboard = live.then(RawKeyboard::enable).flatten();
        if display.entered {
            write_to_terminal(b"\x1b[?1049h\x1b[?25l");
        }
        display
    }

    /// Opens a display that catches signals in every mode, for callers that have to clean up before they exit.
    pub(crate) fn open_with_signals(mode: DisplayMode) -> LiveDisplay {
        let mut display = LiveDisplay::open(mode);
        display.signals = display.signals.take().or_else(SignalWatcher::install);
        display
    }

    /// Returns whether each table replaces the one before.
    pub(crate) fn is_live(&self) -> bool {
        self.mode != DisplayMode::Stream
    }

    /// Returns rows and columns; both are `usize::MAX` for a stream.
    pub(crate) fn size(&self) -> (usize, usize) {
        if self.is_live() { size() } else { (usize::MAX, usize::MAX) }
    }

    /// Shows a table. If it has more lines than the terminal, the rest is counted in a last line. The footer is shown only if
    /// keys can be pressed.
    pub(crate) fn show(
        &mut self,
        lines: &[StyledLine],
        footer: &StyledLine,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        self.frame.clear();
        match self.mode {
            DisplayMode::Stream => {
                if self.tables > 0 {
                    writeln!(out)?;
                }
                for line in lines {
                    crate::output::write_line(out, format_args!("{}", line.text()))?;
                }
            }
            DisplayMode::Inline | DisplayMode::FullScreen => {
                self.draw(lines, footer, size());
                out.write_all(self.frame.as_bytes())?;
            }
        }
        self.tables += 1;
        out.flush()
    }

    /// Builds the frame that replaces the last one, for a terminal of this many rows and columns.
    fn draw(&mut self, lines: &[StyledLine], footer: &StyledLine, (rows, columns): (usize, usize)) {
        let footer_rows = usize::from(self.keyboard.is_some());
        // The cursor is below an inline table and takes a row.
        let cursor_rows = usize::from(self.mode == DisplayMode::Inline);
        let available = rows.saturating_sub(footer_rows + cursor_rows).max(1);
        let shown = if lines.len() > available { available - 1 } else { lines.len() };
        match self.mode {
            DisplayMode::FullScreen => self.frame.push_str("\x1b[H"),
            // Moves up to the first line of the last table and clears everything below.
            _ if self.drawn > 0 => self.frame.push_str(&format!("\x1b[{}F\x1b[J", self.drawn)),
            _ => {}
        }
        let rest = lines.len() - shown;
        let more = (rest > 0).then(|| StyledLine::new(TextStyle::Dim, format_args!("... {rest} more lines")));
        let all = lines[..shown].iter().chain(&more).chain((footer_rows > 0).then_some(footer));
        let full = self.mode == DisplayMode::FullScreen;
        self.drawn = 0;
        for line in all {
            if full && self.drawn > 0 {
                self.frame.push_str("\r\n");
            }
            line.paint(&mut self.frame, columns, self.colors);
            // Clears the end of a longer line after drawing over it: clearing the screen first would flicker.
            self.frame.push_str(if full { "\x1b[K" } else { "\n" });
            self.drawn += 1;
        }
        if full {
            self.frame.push_str("\x1b[J");
        }
    }

    /// Waits for a key, a signal, a new size or the timeout.
    pub(crate) fn wait(&mut self, timeout: Duration) -> WakeReason {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(key) = self.pressed_keys.pop_front() {
                return if raw_keyboard::is_quit_key(key) { WakeReason::Quit } else { WakeReason::Key(key) };
            }
            match self.signals.as_mut().map_or(PendingSignal::None, SignalWatcher::take_pending) {
                PendingSignal::None => {}
                PendingSignal::Resized => return WakeReason::Resized,
                PendingSignal::Quit => return WakeReason::Quit,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.poll(left) {
                Ok(true) => {}
                Ok(false) => return WakeReason::Timeout,
                Err(InputClosed) => return WakeReason::Quit,
            }
        }
    }

    /// Waits for an event and returns whether there was one before the timeout.
    fn poll(&mut self, timeout: Duration) -> Result<bool, InputClosed> {
        let stdin = io::stdin();
        let stdout = io::stdout();
        // `poll` reports errors and hang-ups without being asked for them: a closed reader of standard output is noticed.
        let mut files = vec![PollFd::new(&stdout, PollFlags::empty())];
        files.extend(self.signals.as_ref().map(|signals| PollFd::new(signals.wake_file(), PollFlags::IN)));
        if self.keyboard.is_some() {
            files.push(PollFd::new(&stdin, PollFlags::IN));
        }
        match poll(&mut files, Some(&timespec(timeout))) {
            Ok(0) => return Ok(false),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(true),
            Err(_) => return Err(InputClosed),
        }
        if files[0].revents().intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            return Err(InputClosed);
        }
        let has_keys = self.keyboard.is_some() && files.last().is_some_and(|keys| !keys.revents().is_empty());
        if has_keys && !raw_keyboard::read_keys(&mut self.pressed_keys) {
            return Err(InputClosed);
        }
        Ok(true)
    }
}

impl Drop for LiveDisplay {
    fn drop(&mut self) {
        if self.entered {
            write_to_terminal(b"\x1b[?25h\x1b[?1049l");
        }
    }
}

/// Standard input or output is closed: no further event can arrive.
struct InputClosed;

/// Writes lines once, without cutting them: in color on a terminal, plain elsewhere.
pub(crate) fn print(lines: &[StyledLine], out: &mut dyn Write) -> io::Result<()> {
    let colors = wants_color(&io::stdout());
    let mut painted = String::new();
    for line in lines {
        if colors {
            line.paint_whole(&mut painted);
            painted.push('\n');
        } else {
            crate::output::write_line(out, format_args!("{}", line.text()))?;
        }
    }
    out.write_all(painted.as_bytes())
}

/// Returns whether to write colors to a stream: it is a terminal, `NO_COLOR` is unset or empty, and `TERM` is not `dumb`.
pub(crate) fn wants_color(stream: &impl IsTerminal) -> bool {
    color_allowed(
        stream.is_terminal(),
        std::env::var_os("NO_COLOR").as_deref(),
        std::env::var_os("TERM").as_deref(),
    )
}

fn color_allowed(is_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

/// Returns whether a stream is a terminal that understands cursor movement.
pub(crate) fn can_move_cursor(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Returns whether the locale is UTF-8, so that bars and arrows can be other than ASCII.
pub(crate) fn supports_unicode() -> bool {
    is_utf8_locale(["LC_ALL", "LC_CTYPE", "LANG"].map(std::env::var_os))
}

/// Decides by the first variable that is set, as POSIX specifies.
fn is_utf8_locale(locale: [Option<OsString>; 3]) -> bool {
    let first = locale.into_iter().flatten().find(|value| !value.is_empty());
    first.is_some_and(|value| {
        let value = value.to_string_lossy().to_ascii_lowercase();
        value.contains("utf-8") || value.contains("utf8")
    })
}

/// Returns the terminal's rows and columns, or 24 and 80 if they are not known.
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

/// Writes an escape sequence directly to the terminal. An error means that the terminal is gone, and is ignored.
fn write_to_terminal(sequence: &[u8]) {
    let _ = rustix::io::write(io::stdout(), sequence);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn display(mode: DisplayMode) -> LiveDisplay {
        LiveDisplay {
            mode,
            entered: false,
            colors: false,
            drawn: 0,
            tables: 0,
            keyboard: None,
            pressed_keys: VecDeque::new(),
            signals: None,
            frame: String::new(),
        }
    }

    fn table(lines: usize) -> Vec<StyledLine> {
        (0..lines).map(|line| StyledLine::new(TextStyle::Plain, format_args!("line {line}"))).collect()
    }

    fn frame(display: &mut LiveDisplay, lines: usize, size: (usize, usize)) -> String {
        display.frame.clear();
        display.draw(&table(lines), &StyledLine::default(), size);
        display.frame.clone()
    }

    #[test]
    fn inline_table_replaces_the_last_one() {
        let mut display = display(DisplayMode::Inline);
        assert_eq!(frame(&mut display, 2, (24, 80)), "line 0\nline 1\n");
        assert_eq!(frame(&mut display, 1, (24, 80)), "\x1b[2F\x1b[Jline 0\n");
        assert_eq!(frame(&mut display, 9, (4, 5)), "\x1b[1F\x1b[Jline \nline \n... 7\n");
    }

    #[test]
    fn full_screen_is_never_scrolled() {
        let mut display = display(DisplayMode::FullScreen);
        assert_eq!(frame(&mut display, 2, (2, 80)), "\x1b[Hline 0\x1b[K\r\nline 1\x1b[K\x1b[J");
        assert_eq!(frame(&mut display, 3, (2, 80)), "\x1b[Hline 0\x1b[K\r\n... 2 more lines\x1b[K\x1b[J");
        assert_eq!(frame(&mut display, 3, (1, 80)), "\x1b[H... 3 more lines\x1b[K\x1b[J");
    }

    #[test]
    fn stream_has_whole_tables_without_escape_sequences() {
        let mut display = display(DisplayMode::Stream);
        let mut out = Vec::new();
        let hostile = [StyledLine::new(TextStyle::Error, format_args!("a\x1b[2Jb"))];
        for _ in 0..2 {
            display.show(&hostile, &StyledLine::default(), &mut out).unwrap();
        }
        assert_eq!(String::from_utf8(out).unwrap(), "a\\u{1b}[2Jb\n\na\\u{1b}[2Jb\n");
    }

    #[test]
    fn first_locale_variable_that_is_set_decides_about_unicode() {
        let is_utf8 = |names: [&str; 3]| is_utf8_locale(names.map(|name| Some(name.into())));
        assert!(is_utf8(["", "", "de_DE.UTF-8"]) && is_utf8(["C.utf8", "C", "C"]));
        assert!(!is_utf8(["C", "en_GB.UTF-8", "en_GB.UTF-8"]) && !is_utf8_locale([None, None, None]));
    }

    #[test]
    fn colors_need_a_terminal_and_respect_no_color() {
        let allowed = |is_terminal, no_color: Option<&str>, term: Option<&str>| {
            color_allowed(is_terminal, no_color.map(OsStr::new), term.map(OsStr::new))
        };
        assert!(allowed(true, None, Some("xterm")) && allowed(true, Some(""), None));
        assert!(!allowed(true, Some("1"), Some("xterm")), "NO_COLOR is set");
        assert!(!allowed(true, None, Some("dumb")) && !allowed(false, None, Some("xterm")));
    }
}
