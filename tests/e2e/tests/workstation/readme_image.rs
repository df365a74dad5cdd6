//! The README's image: the screen of a terminal while `make run` runs, as SVG. `make readme-image` draws it again.
#![allow(unsafe_code)]

use rustix::termios::{Winsize, tcsetwinsize};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write as _};
use std::os::fd::FromRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

const COLUMNS: u16 = 100;
const ROWS: u16 = 30;
/// How long the programs run before the image is taken.
const CAPTURE_AFTER: Duration = Duration::from_secs(20);

/// The size of a character in pixels, and the border around the text.
const CHAR_WIDTH: usize = 9;
const LINE_HEIGHT: usize = 20;
const MARGIN: usize = 16;
const BACKGROUND: &str = "#0d1117";
const FOREGROUND: &str = "#d0d7de";

/// Consecutive characters of one style.
#[derive(Debug, PartialEq, Eq)]
struct TextRun {
    column: usize,
    text: String,
    /// The terminal's style code: `1` bold, `2` faint, `31` to `33` colors; empty for plain.
    style: String,
}

/// Returns the rows of the last complete frame.
fn last_frame(drawn: &str) -> Vec<Vec<TextRun>> {
    let whole = drawn.rsplit_once("\x1b[J").map_or("", |(whole, _)| whole);
    let last = whole.rsplit("\x1b[H").next().unwrap();
    last.split("\r\n").map(parse_row).collect()
}

fn parse_row(line: &str) -> Vec<TextRun> {
    let mut runs: Vec<TextRun> = Vec::new();
    let (mut style, mut column, mut new) = (String::new(), 0, true);
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        if letter == '\x1b' {
            let code: String =
                letters.by_ref().skip(1).take_while(|letter| *letter != 'm' && *letter != 'K').collect();
            style = if code == "0" { String::new() } else { code };
            new = true;
            continue;
        }
        // Characters that are drawn as blocks form a run of their own.
        let block = |letter: char| "█▒".contains(letter).then_some(letter);
        let joins = |run: &TextRun| run.text.chars().last().and_then(block) == block(letter);
        match runs.last_mut().filter(|run| !new && joins(run)) {
            Some(run) => run.text.push(letter),
            None => runs.push(TextRun { column, text: letter.into(), style: style.clone() }),
        }
        (column, new) = (column + 1, false);
    }
    runs
}

fn render_svg(rows: &[Vec<TextRun>]) -> String {
    let (width, height) =
        (usize::from(COLUMNS) * CHAR_WIDTH + 2 * MARGIN, rows.len() * LINE_HEIGHT + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-size=\"15\" \
         font-family=\"ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace\">\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"{BACKGROUND}\"/>\n"
    );
    for (at, row) in rows.iter().enumerate() {
        for run in row.iter().filter(|run| !run.text.trim().is_empty()) {
            draw_run(&mut svg, run, MARGIN + at * LINE_HEIGHT);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw_run(svg: &mut String, run: &TextRun, top: usize) {
    let (color, look) = match run.style.as_str() {
        "1" => ("#ffffff", " font-weight=\"bold\""),
        "2" => ("#8b949e", ""),
        "31" => ("#ff7b72", ""),
        "32" => ("#56d364", ""),
        "33" => ("#e3b341", ""),
        _ => (FOREGROUND, ""),
    };
    let (left, length) = (MARGIN + run.column * CHAR_WIDTH, run.text.chars().count() * CHAR_WIDTH);
    let block = |opacity| {
        let (top, height) = (top + 3, LINE_HEIGHT - 6);
        format!(
            "<rect x=\"{left}\" y=\"{top}\" width=\"{length}\" height=\"{height}\" fill=\"{color}\"{opacity}/>\n"
        )
    };
    match run.text.chars().next() {
        Some('█') => svg.push_str(&block("")),
        Some('▒') => svg.push_str(&block(" opacity=\"0.45\"")),
        _ => {
            let text = run.text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            // Columns keep their positions with any font.
            writeln!(
                svg,
                "<text x=\"{left}\" y=\"{}\" textLength=\"{length}\" lengthAdjust=\"spacingAndGlyphs\" fill=\"{color}\"{look} \
                 xml:space=\"preserve\">{text}</text>",
                top + 15
            )
            .unwrap();
        }
    }
}

#[test]
fn last_complete_frame_is_rendered_as_svg() {
    let drawn = "\x1b[?1049h\x1b[Hold\x1b[K\x1b[J\x1b[H\x1b[1mA\x1b[0m<b\x1b[K\r\n\x1b[32m██▒\x1b[0m··\x1b[K\x1b[J\x1b[Hhalf";
    let rows = last_frame(drawn);
    let run = |column, text: &str, style: &str| TextRun { column, text: text.into(), style: style.into() };
    assert_eq!(
        rows,
        [
            vec![run(0, "A", "1"), run(1, "<b", "")],
            vec![run(0, "██", "32"), run(2, "▒", "32"), run(3, "··", "")]
        ]
    );
    let svg = render_svg(&rows);
    assert!(
        svg.contains("font-weight=\"bold\" xml:space=\"preserve\">A</text>") && svg.contains(">&lt;b</text>"),
        "{svg}"
    );
    assert!(svg.contains("width=\"18\" height=\"14\" fill=\"#56d364\"/>"), "{svg}");
}

/// Runs the command of `make run` on a terminal of its own, and draws the screen after a while.
#[test]
#[ignore = "takes half a minute and writes docs/images/up.svg: make readme-image"]
fn readme_image_is_captured() {
    let top = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let program = Path::new(partage_e2e::partage());
    let sample = program.with_file_name("partage-sample");
    assert!(sample.exists(), "{}: build it first", sample.display());
    let (mut controller_end, mut terminal_end) = (0, 0);
    // SAFETY: the two pointers are to local variables; no name, modes or size are passed.
    let made =
        unsafe { libc::openpty(&mut controller_end, &mut terminal_end, null_mut(), null_mut(), null_mut()) };
    assert_eq!(made, 0);
    // SAFETY: the descriptor was just opened, and has no other owner.
    let mut controller_end = unsafe { File::from_raw_fd(controller_end) };
    // SAFETY: the descriptor was just opened, and has no other owner.
    let terminal_end = unsafe { File::from_raw_fd(terminal_end) };
    tcsetwinsize(&terminal_end, Winsize { ws_row: ROWS, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 })
        .unwrap();
    let state_dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(program);
    command.args(["up", "--metrics", "off", "--start", "examples/workloads.yaml"]).current_dir(top);
    command
        .env("PARTAGE_STATE_DIR", state_dir.path())
        .env("LC_ALL", "C.UTF-8")
        .env("TERM", "xterm")
        .env_remove("NO_COLOR");
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", program.parent().unwrap().display()));
    command.stdin(terminal_end.try_clone().unwrap()).stdout(terminal_end).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    drop(command);
    let begun = Instant::now();
    let (mut drawn, mut bytes) = (Vec::new(), [0; 4096]);
    while begun.elapsed() < CAPTURE_AFTER {
        let read = controller_end.read(&mut bytes).unwrap();
        drawn.extend_from_slice(&bytes[..read]);
    }
    controller_end.write_all(b"q").unwrap();
    // It ends only if its output is read.
    while controller_end.read(&mut bytes).is_ok_and(|read| read > 0) {}
    assert!(child.wait().unwrap().success());
    let mut rows = last_frame(&String::from_utf8(drawn).unwrap());
    // Replace the name of the machine.
    if let Some(name) = rows.first_mut().and_then(|row| row.first_mut()) {
        name.text = "workstation".into();
    }
    let shift = "workstation".len();
    if let Some(rest) = rows.first_mut().and_then(|row| row.get_mut(1)) {
        rest.column = shift;
    }
    std::fs::write(top.join("docs/images/up.svg"), render_svg(&rows)).unwrap();
}
