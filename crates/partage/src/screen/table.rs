//! Tables that lose columns where there is no room, and never wrap.

use super::{Line, Style};

/// Between two columns.
const GAP: usize = 2;
/// Enough of a sentence to know what it is about.
const SOME: usize = 16;

/// A column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    /// What stands above it.
    pub(crate) head: &'static str,
    /// Numbers stand at the right.
    pub(crate) right: bool,
    /// Where there is no room, the highest goes first; what has zero stays.
    pub(crate) goes: u8,
    /// Longer text is cut, where there is an end to the room.
    pub(crate) most: usize,
}

impl Column {
    pub(crate) const fn text(head: &'static str, goes: u8, most: usize) -> Column {
        Column { head, right: false, goes, most }
    }

    pub(crate) const fn number(head: &'static str, goes: u8) -> Column {
        Column { head, right: true, goes, most: usize::MAX }
    }
}

/// Head and rows in at most so many letters; `usize::MAX` for as many as it takes.
///
/// The last column may be cut by the end of the line: it needs only some room.
pub(crate) fn table(columns: &[Column], mut rows: Vec<Vec<Line>>, width: usize) -> Vec<Line> {
    let mut widths: Vec<usize> = columns.iter().map(|column| column.head.chars().count()).collect();
    for row in &mut rows {
        for ((cell, column), most) in row.iter_mut().zip(columns).zip(&mut widths) {
            if width < usize::MAX {
                cell.cut(column.most);
            }
            *most = cell.width().max(*most);
        }
    }
    let stays = that_fit(columns, &widths, width);
    let mut lines = Vec::with_capacity(rows.len() + 1);
    let heads: Vec<Line> =
        columns.iter().map(|column| Line::plain(Style::Head, format_args!("{}", column.head))).collect();
    lines.push(joined(columns, &widths, &stays, &heads));
    lines.extend(rows.iter().map(|row| joined(columns, &widths, &stays, row)));
    for line in &mut lines {
        line.cut(width);
    }
    lines
}

/// Whether each column stays.
fn that_fit(columns: &[Column], widths: &[usize], width: usize) -> Vec<bool> {
    let mut stays = vec![true; columns.len()];
    loop {
        let last = stays.iter().rposition(|stays| *stays);
        let needs = |at: usize| match Some(at) == last && !columns[at].right {
            true => widths[at].min(columns[at].head.len().max(SOME)),
            false => widths[at],
        };
        let all: usize = (0..columns.len()).filter(|&at| stays[at]).map(|at| needs(at) + GAP).sum();
        let first_to_go = (0..columns.len()).filter(|&at| stays[at] && columns[at].goes > 0);
        match first_to_go.max_by_key(|&at| columns[at].goes) {
            Some(goes) if all.saturating_sub(GAP) > width => stays[goes] = false,
            _ => return stays,
        }
    }
}

fn joined(columns: &[Column], widths: &[usize], stays: &[bool], row: &[Line]) -> Line {
    let mut line = Line::default();
    let cells = row.iter().zip(columns).zip(widths.iter().zip(stays)).filter(|(_, (_, stays))| **stays);
    for (number, ((cell, column), (width, _))) in cells.enumerate() {
        if number > 0 {
            line.space(GAP);
        }
        let room = width.saturating_sub(cell.width());
        if column.right {
            line.space(room);
        }
        line.append(cell);
        if !column.right {
            line.space(room);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 4] = [
        Column::text("NAME", 0, 6),
        Column::text("USER", 1, 9),
        Column::number("USED", 0),
        Column::text("WHY", 2, 99),
    ];

    fn shown(width: usize) -> Vec<String> {
        let row =
            |cells: [&str; 4]| cells.map(|cell| Line::plain(Style::Plain, format_args!("{cell}"))).to_vec();
        let rows = vec![
            row(["a", "ada", "1 GiB", ""]),
            row(["trainer", "bob", "12 GiB", "it is slow, and so is she"]),
        ];
        table(&COLUMNS, rows, width).iter().map(|line| line.text().to_string()).collect()
    }

    #[test]
    fn columns_go_in_their_order_and_nothing_wraps() {
        assert_eq!(
            shown(usize::MAX),
            [
                "NAME     USER    USED  WHY",
                "a        ada    1 GiB",
                "trainer  bob   12 GiB  it is slow, and so is she"
            ]
        );
        assert_eq!(
            shown(38),
            ["NAME    USER    USED  WHY", "a       ada    1 GiB", "train…  bob   12 GiB  it is slow, and…"]
        );
        assert_eq!(shown(37), ["NAME    USER    USED", "a       ada    1 GiB", "train…  bob   12 GiB"]);
        assert_eq!(shown(19), ["NAME      USED", "a        1 GiB", "train…  12 GiB"]);
        assert_eq!(shown(8), ["NAME   …", "a      …", "train… …"]);
    }
}
