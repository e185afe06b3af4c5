//! The report as Markdown, for issues and pull requests.

use super::{
    View,
    document::Document,
    section::{Column, Section},
    sections,
};

#[must_use]
pub fn render(view: &View<'_>) -> String {
    let d = Document::new(view);
    let head = sections::head(view, &d);
    let mut parts = vec![format!("# {}\n\n{}", head.title, notes(&head))];
    parts.extend(sections::results(view, &d).iter().map(section));
    if !view.gates.is_empty() {
        parts.push(section(&sections::gates(view, &d)));
    }
    parts.push(format!("Reproduce: `{}`\n", view.reproduce));
    parts.join("\n")
}

pub(crate) fn section(section: &Section) -> String {
    if section.rows.is_empty() {
        return format!("**{}**\n\n{}", section.title, notes(section));
    }
    let titles = section.columns.iter().map(Column::title);
    let titles: Vec<&str> = [section.title.as_str()].into_iter().chain(titles).collect();
    let mut text = line(titles.iter().map(|title| (*title).to_owned()));
    let rules = section.columns.iter().map(|column| match column {
        Column::Number(_) => "--:|",
        Column::Text(_) | Column::Verdict(_) | Column::Remark(_) => "---|",
    });
    text.push_str(&format!("|---|{}\n", rules.collect::<String>()));
    for row in &section.rows {
        let cells = section.columns.iter().zip(&row[1..]);
        let cells = cells.map(|(column, cell)| match column {
            Column::Verdict(_) => format!("**{cell}**"),
            Column::Number(_) | Column::Text(_) | Column::Remark(_) => cell.clone(),
        });
        text.push_str(&line([row[0].clone()].into_iter().chain(cells)));
    }
    if !section.notes.is_empty() {
        text.push_str(&format!("\n{}", notes(section)));
    }
    text
}

fn line(cells: impl Iterator<Item = String>) -> String {
    let cells: Vec<String> = cells.map(|cell| cell.replace('|', "\\|")).collect();
    format!("| {} |\n", cells.join(" | "))
}

fn notes(section: &Section) -> String {
    let notes = section.notes.iter();
    notes.map(|note| format!("- {note}\n")).collect()
}
