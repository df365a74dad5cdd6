//! Tables that drop their least important columns on narrow terminals and never wrap.
//!
//! Hand-written: comfy-table and tabled wrap or truncate all columns alike, and cannot drop columns by priority.

use super::{StyledLine, TextStyle};

/// Spaces between two columns.
const COLUMN_GAP: usize = 2;
/// Minimum width of a last text column that is cut by the end of the line.
const MIN_TEXT_WIDTH: usize = 16;

/// A column of a table and how it behaves on narrow terminals.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableColumn {
    /// Title in the first line.
    pub(crate) title: &'static str,
    /// Whether cells are right-aligned, as numbers are.
    pub(crate) right_aligned: bool,
    /// Columns with the highest priority are dropped first on a narrow terminal; 0 is never dropped.
    pub(crate) drop_priority: u8,
    /// Maximum width of a cell on a terminal; longer text is cut.
    pub(crate) max_width: usize,
}

impl TableColumn {
    pub(crate) const fn text(title: &'static str, drop_priority: u8, max_width: usize) -> TableColumn {
        TableColumn { title, right_aligned: false, drop_priority, max_width }
    }

    pub(crate) const fn number(title: &'static str, drop_priority: u8) -> TableColumn {
        TableColumn { title, right_aligned: true, drop_priority, max_width: usize::MAX }
    }
}

/// Lays out a title line and rows in at most `width` characters; `usize::MAX` is unlimited.
///
/// A last text column may be cut by the end of the line and needs only [`MIN_TEXT_WIDTH`].
pub(crate) fn layout_table(
    columns: &[TableColumn],
    mut rows: Vec<Vec<StyledLine>>,
    width: usize,
) -> Vec<StyledLine> {
    let mut widths: Vec<usize> = columns.iter().map(|column| column.title.chars().count()).collect();
    for row in &mut rows {
        for ((cell, column), widest) in row.iter_mut().zip(columns).zip(&mut widths) {
            if width < usize::MAX {
                cell.cut(column.max_width);
            }
            *widest = cell.width().max(*widest);
        }
    }
    let visible = visible_columns(columns, &widths, width);
    let mut lines = Vec::with_capacity(rows.len() + 1);
    let heads: Vec<StyledLine> = columns
        .iter()
        .map(|column| StyledLine::new(TextStyle::Heading, format_args!("{}", column.title)))
        .collect();
    lines.push(join_cells(columns, &widths, &visible, &heads));
    lines.extend(rows.iter().map(|row| join_cells(columns, &widths, &visible, row)));
    for line in &mut lines {
        line.cut(width);
    }
    lines
}

/// Returns for each column whether it is shown.
fn visible_columns(columns: &[TableColumn], widths: &[usize], width: usize) -> Vec<bool> {
    let mut visible = vec![true; columns.len()];
    loop {
        let last = visible.iter().rposition(|visible| *visible);
        let required = |at: usize| {
            if Some(at) == last && !columns[at].right_aligned {
                widths[at].min(columns[at].title.len().max(MIN_TEXT_WIDTH))
            } else {
                widths[at]
            }
        };
        let total: usize =
            (0..columns.len()).filter(|&at| visible[at]).map(|at| required(at) + COLUMN_GAP).sum();
        let droppable = (0..columns.len()).filter(|&at| visible[at] && columns[at].drop_priority > 0);
        match droppable.max_by_key(|&at| columns[at].drop_priority) {
            Some(dropped) if total.saturating_sub(COLUMN_GAP) > width => visible[dropped] = false,
            _ => return visible,
        }
    }
}

fn join_cells(columns: &[TableColumn], widths: &[usize], visible: &[bool], row: &[StyledLine]) -> StyledLine {
    let mut line = StyledLine::default();
    let cells = row.iter().zip(columns).zip(widths.iter().zip(visible)).filter(|(_, (_, visible))| **visible);
    for (number, ((cell, column), (width, _))) in cells.enumerate() {
        if number > 0 {
            line.space(COLUMN_GAP);
        }
        let padding = width.saturating_sub(cell.width());
        if column.right_aligned {
            line.space(padding);
        }
        line.append(cell);
        if !column.right_aligned {
            line.space(padding);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [TableColumn; 4] = [
        TableColumn::text("NAME", 0, 6),
        TableColumn::text("USER", 1, 9),
        TableColumn::number("USED", 0),
        TableColumn::text("WHY", 2, 99),
    ];

    fn shown(width: usize) -> Vec<String> {
        let row = |cells: [&str; 4]| {
            cells.map(|cell| StyledLine::new(TextStyle::Plain, format_args!("{cell}"))).to_vec()
        };
        let rows = vec![
            row(["a", "ada", "1 GiB", ""]),
            row(["trainer", "bob", "12 GiB", "it is slow, and so is she"]),
        ];
        layout_table(&COLUMNS, rows, width).iter().map(|line| line.text().to_string()).collect()
    }

    #[test]
    fn columns_are_dropped_by_priority_and_lines_never_wrap() {
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
