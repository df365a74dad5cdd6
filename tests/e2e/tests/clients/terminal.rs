//! A terminal for programs that draw on one, with the current text of its screen.

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

const ROWS: usize = 40;
const COLUMNS: usize = 140;

/// A program on a terminal of its own. It is killed when dropped.
pub(crate) struct TerminalProgram {
    child: Child,
    controller: File,
    screen: Arc<Mutex<VtScreen>>,
    reader: Option<JoinHandle<()>>,
}

impl TerminalProgram {
    /// Starts the program on the simplest kind of terminal that programs can draw on.
    pub(crate) fn start(command: &mut Command) -> Self {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        let size = Winsize { ws_row: ROWS as u16, ws_col: COLUMNS as u16, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&controller, size).unwrap();
        let name = ptsname(&controller, Vec::new()).unwrap();
        let terminal = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        command.stdin(terminal.try_clone().unwrap()).stdout(terminal.try_clone().unwrap()).stderr(terminal);
        let child = command.env("TERM", "vt100").spawn().unwrap();
        // The command keeps the other end open; without it, reading ends with the program.
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let screen = Arc::new(Mutex::new(VtScreen::new()));
        let (mut from, onto) = (File::from(controller.try_clone().unwrap()), Arc::clone(&screen));
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                let mut screen = onto.lock().unwrap();
                bytes[..count].iter().for_each(|&byte| screen.feed(byte));
            }
        });
        Self { child, controller: controller.into(), screen, reader: Some(reader) }
    }

    /// Returns the text on the screen.
    pub(crate) fn text(&self) -> String {
        self.screen.lock().unwrap().text()
    }

    /// Sends keys to the program.
    pub(crate) fn press(&mut self, keys: &str) {
        self.controller.write_all(keys.as_bytes()).unwrap();
    }

    /// Returns the exit status, if the program has ended.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for TerminalProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// The screen of a VT100, as far as the programs use it: cursor moves, erasing, and characters; colors and similar
/// commands are ignored.
struct VtScreen {
    cells: Vec<Vec<char>>,
    row: usize,
    column: usize,
    /// An incomplete command, from after its escape character.
    command: Option<Vec<u8>>,
    /// The first bytes of a character of several bytes.
    char_bytes: Vec<u8>,
}

impl VtScreen {
    fn new() -> Self {
        Self {
            cells: vec![vec![' '; COLUMNS]; ROWS],
            row: 0,
            column: 0,
            command: None,
            char_bytes: Vec::new(),
        }
    }

    fn text(&self) -> String {
        let line = |row: &Vec<char>| row.iter().collect::<String>().trim_end().to_string();
        self.cells.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    fn feed(&mut self, byte: u8) {
        if let Some(command) = &mut self.command {
            command.push(byte);
            // `[` and `(` start longer commands; others end with the next character.
            let whole = match command[0] {
                b'[' => command.len() > 1 && byte.is_ascii_alphabetic(),
                b'(' | b')' => command.len() > 1,
                _ => true,
            };
            if whole {
                let command = self.command.take().unwrap();
                self.execute(&command);
            }
            return;
        }
        match byte {
            0x1b => self.command = Some(Vec::new()),
            b'\r' => self.column = 0,
            b'\n' => self.down(1),
            0x08 => self.column = self.column.saturating_sub(1),
            0..0x20 => {}
            _ => self.write(byte),
        }
    }

    fn write(&mut self, byte: u8) {
        self.char_bytes.push(byte);
        match std::str::from_utf8(&self.char_bytes) {
            Ok(text) => {
                let char_bytes = text.chars().next().unwrap();
                self.char_bytes.clear();
                if self.column >= COLUMNS {
                    self.column = 0;
                    self.down(1);
                }
                self.cells[self.row][self.column] = char_bytes;
                self.column += 1;
            }
            Err(error) if error.error_len().is_some() => self.char_bytes.clear(),
            Err(_) => {}
        }
    }

    fn down(&mut self, rows: usize) {
        self.row = (self.row + rows).min(ROWS - 1);
    }

    fn execute(&mut self, command: &[u8]) {
        let (b'[', [numbers @ .., kind]) = (command[0], &command[1..]) else { return };
        let numbers: Vec<usize> =
            String::from_utf8_lossy(numbers).split(';').map(|text| text.parse().unwrap_or(0)).collect();
        let number = |place: usize| numbers.get(place).copied().unwrap_or(0);
        let (count, row) = (number(0).max(1), self.row);
        match kind {
            b'H' => {
                self.row = count.min(ROWS) - 1;
                self.column = number(1).clamp(1, COLUMNS) - 1;
            }
            b'A' => self.row = row.saturating_sub(count),
            b'B' => self.down(count),
            b'C' => self.column = (self.column + count).min(COLUMNS - 1),
            b'D' => self.column = self.column.saturating_sub(count),
            b'K' if number(0) == 1 => self.cells[row][..=self.column.min(COLUMNS - 1)].fill(' '),
            b'K' => self.cells[row][self.column.min(COLUMNS)..].fill(' '),
            b'J' => {
                self.cells[row][self.column.min(COLUMNS)..].fill(' ');
                self.cells[row + 1..].iter_mut().for_each(|row| row.fill(' '));
            }
            _ => {}
        }
    }
}
