//! The README's picture: what a terminal shows while `make run` runs, as SVG. `make picture` draws it anew.
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
/// When everybody has worked for a while.
const AFTER: Duration = Duration::from_secs(20);

/// Letters in pixels, and the edge around them.
const WIDTH: usize = 9;
const HEIGHT: usize = 20;
const EDGE: usize = 16;
const BEHIND: &str = "#0d1117";
const PLAIN: &str = "#d0d7de";

/// A few letters that look the same.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    column: usize,
    text: String,
    /// As the terminal was told: `1` bold, `2` faint, `31` to `33` colours; empty for plain.
    style: String,
}

/// The rows of the last whole frame that was drawn.
fn frame(drawn: &str) -> Vec<Vec<Run>> {
    let whole = drawn.rsplit_once("\x1b[J").map_or("", |(whole, _)| whole);
    let last = whole.rsplit("\x1b[H").next().unwrap();
    last.split("\r\n").map(row).collect()
}

fn row(line: &str) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
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
        // What is drawn as a block is a run of its own.
        let block = |letter: char| "█▒".contains(letter).then_some(letter);
        let joins = |run: &Run| run.text.chars().last().and_then(block) == block(letter);
        match runs.last_mut().filter(|run| !new && joins(run)) {
            Some(run) => run.text.push(letter),
            None => runs.push(Run { column, text: letter.into(), style: style.clone() }),
        }
        (column, new) = (column + 1, false);
    }
    runs
}

fn svg(rows: &[Vec<Run>]) -> String {
    let (width, height) = (usize::from(COLUMNS) * WIDTH + 2 * EDGE, rows.len() * HEIGHT + 2 * EDGE);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-size=\"15\" \
         font-family=\"ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace\">\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"{BEHIND}\"/>\n"
    );
    for (at, row) in rows.iter().enumerate() {
        for run in row.iter().filter(|run| !run.text.trim().is_empty()) {
            draw(&mut svg, run, EDGE + at * HEIGHT);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw(svg: &mut String, run: &Run, top: usize) {
    let (colour, look) = match run.style.as_str() {
        "1" => ("#ffffff", " font-weight=\"bold\""),
        "2" => ("#8b949e", ""),
        "31" => ("#ff7b72", ""),
        "32" => ("#56d364", ""),
        "33" => ("#e3b341", ""),
        _ => (PLAIN, ""),
    };
    let (left, length) = (EDGE + run.column * WIDTH, run.text.chars().count() * WIDTH);
    let block = |opacity| {
        let (top, height) = (top + 3, HEIGHT - 6);
        format!(
            "<rect x=\"{left}\" y=\"{top}\" width=\"{length}\" height=\"{height}\" fill=\"{colour}\"{opacity}/>\n"
        )
    };
    match run.text.chars().next() {
        Some('█') => svg.push_str(&block("")),
        Some('▒') => svg.push_str(&block(" opacity=\"0.45\"")),
        _ => {
            let text = run.text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            // Whichever font it is, columns stand where they stand.
            writeln!(
                svg,
                "<text x=\"{left}\" y=\"{}\" textLength=\"{length}\" lengthAdjust=\"spacingAndGlyphs\" fill=\"{colour}\"{look} \
                 xml:space=\"preserve\">{text}</text>",
                top + 15
            )
            .unwrap();
        }
    }
}

#[test]
fn the_last_whole_frame_becomes_a_picture() {
    let drawn = "\x1b[?1049h\x1b[Hold\x1b[K\x1b[J\x1b[H\x1b[1mA\x1b[0m<b\x1b[K\r\n\x1b[32m██▒\x1b[0m··\x1b[K\x1b[J\x1b[Hhalf";
    let rows = frame(drawn);
    let run = |column, text: &str, style: &str| Run { column, text: text.into(), style: style.into() };
    assert_eq!(
        rows,
        [
            vec![run(0, "A", "1"), run(1, "<b", "")],
            vec![run(0, "██", "32"), run(2, "▒", "32"), run(3, "··", "")]
        ]
    );
    let svg = svg(&rows);
    assert!(
        svg.contains("font-weight=\"bold\" xml:space=\"preserve\">A</text>") && svg.contains(">&lt;b</text>"),
        "{svg}"
    );
    assert!(svg.contains("width=\"18\" height=\"14\" fill=\"#56d364\"/>"), "{svg}");
}

/// Runs what `make run` runs, on a terminal of its own, and draws what is there after a while.
#[test]
#[ignore = "takes half a minute and writes docs/images/up.svg: make picture"]
fn the_picture_of_the_readme() {
    let top = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let program = Path::new(partage_e2e::partage());
    let sample = program.with_file_name("partage-sample");
    assert!(sample.exists(), "{}: build it first", sample.display());
    let (mut ours, mut theirs) = (0, 0);
    // SAFETY: two variables for the two ends; no name, modes or size are given.
    let made = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null_mut(), null_mut()) };
    assert_eq!(made, 0);
    // SAFETY: it was opened just now, and is nobody else's.
    let mut ours = unsafe { File::from_raw_fd(ours) };
    // SAFETY: likewise.
    let theirs = unsafe { File::from_raw_fd(theirs) };
    tcsetwinsize(&theirs, Winsize { ws_row: ROWS, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new(program);
    command.args(["up", "--metrics", "off", "--start", "examples/workloads.yaml"]).current_dir(top);
    command
        .env("PARTAGE_HOME", home.path())
        .env("LC_ALL", "C.UTF-8")
        .env("TERM", "xterm")
        .env_remove("NO_COLOR");
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", program.parent().unwrap().display()));
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    drop(command);
    let begun = Instant::now();
    let (mut drawn, mut bytes) = (Vec::new(), [0; 4096]);
    while begun.elapsed() < AFTER {
        let read = ours.read(&mut bytes).unwrap();
        drawn.extend_from_slice(&bytes[..read]);
    }
    ours.write_all(b"q").unwrap();
    // It ends only if somebody reads what it says.
    while ours.read(&mut bytes).is_ok_and(|read| read > 0) {}
    assert!(child.wait().unwrap().success());
    let mut rows = frame(&String::from_utf8(drawn).unwrap());
    // Whose machine it was is nobody's business.
    if let Some(name) = rows.first_mut().and_then(|row| row.first_mut()) {
        name.text = "workstation".into();
    }
    let shift = "workstation".len();
    if let Some(rest) = rows.first_mut().and_then(|row| row.get_mut(1)) {
        rest.column = shift;
    }
    std::fs::write(top.join("docs/images/up.svg"), svg(&rows)).unwrap();
}
