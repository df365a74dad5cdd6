//! A terminal for programs that draw on one: what they wrote last is on its screen.

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

const ROWS: usize = 40;
const COLUMNS: usize = 140;

/// A program on a terminal of its own. It ends with the value.
pub(crate) struct OnScreen {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<Screen>>,
    reader: Option<JoinHandle<()>>,
}

impl OnScreen {
    /// Starts the program on a terminal of the plainest kind that can be drawn on.
    pub(crate) fn start(command: &mut Command) -> Self {
        let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let size = Winsize { ws_row: ROWS as u16, ws_col: COLUMNS as u16, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&keyboard, size).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let terminal = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        command.stdin(terminal.try_clone().unwrap()).stdout(terminal.try_clone().unwrap()).stderr(terminal);
        let child = command.env("TERM", "vt100").spawn().unwrap();
        // The command keeps the other end open; without it, reading ends with the program.
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let screen = Arc::new(Mutex::new(Screen::new()));
        let (mut from, onto) = (File::from(keyboard.try_clone().unwrap()), Arc::clone(&screen));
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                let mut screen = onto.lock().unwrap();
                bytes[..count].iter().for_each(|&byte| screen.take(byte));
            }
        });
        Self { child, keyboard: keyboard.into(), screen, reader: Some(reader) }
    }

    /// What is on the screen.
    pub(crate) fn text(&self) -> String {
        self.screen.lock().unwrap().text()
    }

    /// Presses keys.
    pub(crate) fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for OnScreen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// What a VT100 shows, as far as programs use it: moves, erasing, and letters; colours and the like are passed over.
struct Screen {
    cells: Vec<Vec<char>>,
    row: usize,
    column: usize,
    /// A command that is not whole yet, from after its escape.
    command: Option<Vec<u8>>,
    /// Of a letter of several bytes.
    letter: Vec<u8>,
}

impl Screen {
    fn new() -> Self {
        Self { cells: vec![vec![' '; COLUMNS]; ROWS], row: 0, column: 0, command: None, letter: Vec::new() }
    }

    fn text(&self) -> String {
        let line = |row: &Vec<char>| row.iter().collect::<String>().trim_end().to_string();
        self.cells.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    fn take(&mut self, byte: u8) {
        if let Some(command) = &mut self.command {
            command.push(byte);
            // `[` and `(` go on; the others are whole with the next letter.
            let whole = match command[0] {
                b'[' => command.len() > 1 && byte.is_ascii_alphabetic(),
                b'(' | b')' => command.len() > 1,
                _ => true,
            };
            if whole {
                let command = self.command.take().unwrap();
                self.obey(&command);
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
        self.letter.push(byte);
        match std::str::from_utf8(&self.letter) {
            Ok(text) => {
                let letter = text.chars().next().unwrap();
                self.letter.clear();
                if self.column >= COLUMNS {
                    self.column = 0;
                    self.down(1);
                }
                self.cells[self.row][self.column] = letter;
                self.column += 1;
            }
            Err(error) if error.error_len().is_some() => self.letter.clear(),
            Err(_) => {}
        }
    }

    fn down(&mut self, rows: usize) {
        self.row = (self.row + rows).min(ROWS - 1);
    }

    fn obey(&mut self, command: &[u8]) {
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
