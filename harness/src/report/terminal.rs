//! The report for a terminal: plain text without colours.

use super::{
    View,
    document::Document,
    section::{Column, Section},
    sections,
};
use crate::gate::Verdict;

#[must_use]
pub fn render(view: &View<'_>) -> String {
    let d = Document::new(view);
    let mut parts = vec![section(&sections::head(view, &d))];
    parts.extend(sections::results(view, &d).iter().map(section));
    if !view.gates.is_empty() {
        parts.push(section(&sections::gates(view, &d)));
    }
    if view
        .gates
        .iter()
        .any(|gate| gate.verdict == Verdict::Missed)
    {
        parts.push(format!("reproduce: {}\n", view.reproduce));
    }
    parts.join("\n")
}

/// The lines of a section, the title first. Rows and remarks are indented.
#[must_use]
pub fn section(section: &Section) -> String {
    let columns = &section.columns;
    let titles: Vec<String> = columns
        .iter()
        .map(|column| column.title().to_owned())
        .collect();
    let header: Vec<String> = [section.title.clone()].into_iter().chain(titles).collect();
    let indent = |row: &Vec<String>| [vec![format!("  {}", row[0])], row[1..].to_vec()].concat();
    let rows: Vec<Vec<String>> = section.rows.iter().map(indent).collect();
    // A title alone may be longer than all names.
    let measured = rows.iter().chain(section.has_header().then_some(&header));
    let mut widths = vec![0; header.len()];
    for row in measured {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = line(&header, columns, &widths);
    for row in &rows {
        text.push_str(&line(row, columns, &widths));
        let remarks = columns.iter().zip(&row[1..]);
        for (column, cell) in remarks {
            if matches!(column, Column::Remark(_)) && !cell.is_empty() {
                text.push_str(&format!("    {cell}\n"));
            }
        }
    }
    for note in &section.notes {
        text.push_str(&format!("  {note}\n"));
    }
    text
}

fn line(cells: &[String], columns: &[Column], widths: &[usize]) -> String {
    let (name, width) = (&cells[0], widths[0]);
    let mut line = format!("{name:<width$}");
    for ((column, cell), width) in columns.iter().zip(&cells[1..]).zip(&widths[1..]) {
        line.push_str(&match column {
            Column::Number(_) => format!("  {cell:>width$}"),
            Column::Text(_) | Column::Verdict(_) => format!("  {cell:<width$}"),
            Column::Remark(_) => String::new(),
        });
    }
    format!("{}\n", line.trim_end())
}
