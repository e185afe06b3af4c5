//! Output for people (tables with stable columns) and for programs (`--json`).
//!
//! Every command with `--json` prints one object: `{"format":1,"kind":K,"items":[…]}`. Items have the field names
//! of E2B's interface. Data goes to standard output, everything else to standard error.
//!
//! Texts from servers are not trusted: output for people contains no control characters except line ends.

use std::io::{self, Write};

use envd::{Timestamp, one_line};
use serde::Serialize;
use serde_json::{Value, json};

use crate::failure::Failure;

/// Version of the JSON shape.
pub(crate) const FORMAT: u32 = 1;

/// Output format of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Human,
    Json,
}

impl Format {
    /// Prints a list: JSON items, or a table with these columns. An empty table has only its header.
    pub(crate) fn list<T: Serialize>(
        self,
        kind: &str,
        items: &[T],
        columns: &[&str],
        row: impl Fn(&T) -> Vec<String>,
    ) -> Result<(), Failure> {
        match self {
            Self::Json => self.json(kind, items),
            Self::Human => {
                let rows: Vec<_> = items.iter().map(|item| cells(&row(item))).collect();
                print(&table(columns, &rows))
            }
        }
    }

    /// Prints the properties of one object: a JSON item, or lines with a name and a value.
    pub(crate) fn properties<T: Serialize>(
        self,
        kind: &str,
        item: &T,
        lines: &[(&str, String)],
    ) -> Result<(), Failure> {
        match self {
            Self::Json => self.json(kind, std::slice::from_ref(item)),
            Self::Human => print(&properties(lines)),
        }
    }

    /// Prints the result of an action: a JSON item, or a line.
    pub(crate) fn done(self, kind: &str, item: &Value, line: &str) -> Result<(), Failure> {
        match self {
            Self::Human if line.is_empty() => Ok(()),
            _ => self.lines(kind, item, &[line]),
        }
    }

    /// Like [`Self::done`], for several lines.
    pub(crate) fn lines(self, kind: &str, item: &Value, lines: &[&str]) -> Result<(), Failure> {
        match self {
            Self::Json => self.json(kind, std::slice::from_ref(item)),
            Self::Human => {
                let lines = lines.iter().map(|line| format!("{}\n", one_line(line)));
                print(&lines.collect::<String>())
            }
        }
    }

    fn json<T: Serialize>(self, kind: &str, items: &[T]) -> Result<(), Failure> {
        let items = serde_json::to_value(items)
            .map_err(|why| Failure::refused(format!("the answer has no JSON form: {why}")))?;
        print_json(&json!({"format": FORMAT, "kind": kind, "items": items}))
    }
}

/// Writes lines for a person to standard output.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let lines = text.split('\n').map(one_line);
    write(&lines.collect::<Vec<_>>().join("\n"))
}

/// Writes a line of JSON to standard output.
pub(crate) fn print_json(value: &Value) -> Result<(), Failure> {
    write(&format!("{value}\n"))
}

/// Writes to standard output. If the reader is gone, ends the program quietly, as SIGPIPE would.
pub(crate) fn write(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|why| match why.kind() {
        io::ErrorKind::BrokenPipe => std::process::exit(BROKEN_PIPE),
        _ => Failure::host(format!("cannot write to standard output: {why}")),
    })
}

/// Exit code of a program that SIGPIPE ended, as in shells.
pub(crate) const BROKEN_PIPE: i32 = 128 + 13;

fn cells(row: &[String]) -> Vec<String> {
    row.iter().map(|cell| one_line(cell)).collect()
}

/// A table whose columns are as wide as their longest cell. The last one has no padding.
fn table(columns: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<_> = columns.iter().map(|name| (*name).to_owned()).collect();
    let rows = std::iter::once(&header).chain(rows);
    let width = |at: usize| {
        let cells = rows.clone().filter_map(|row| row.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns.len()).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let padding = width - cell.chars().count() + 2;
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', padding));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Lines with a name and a value each.
pub(crate) fn properties(lines: &[(&str, String)]) -> String {
    let widest = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let lines = lines.iter().filter(|(_, value)| !value.is_empty());
    let lines = lines.map(|(name, value)| {
        let name = format!("{name}:");
        format!("{name:<width$}{}\n", one_line(value), width = widest + 2)
    });
    lines.collect()
}

/// Whole seconds in UTC, or `-` for `None`.
pub(crate) fn time(at: Option<Timestamp>) -> String {
    at.map_or("-".to_owned(), |at| {
        let text = at.to_string();
        match text.split_once('.') {
            Some((seconds, _)) => format!("{seconds}Z"),
            None => text,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_blanks() {
        let rows = [
            vec!["a".to_owned(), "running".to_owned()],
            vec!["longer".to_owned(), String::new()],
        ];
        let text = table(&["ID", "STATE"], &rows);
        assert_eq!(text, "ID      STATE\na       running\nlonger\n");
        assert_eq!(table(&["ID"], &[]), "ID\n");
    }

    #[test]
    fn properties_without_a_value_are_left_out() {
        let lines = [("id", "x".to_owned()), ("domain", String::new())];
        assert_eq!(properties(&lines), "id:     x\n");
        let hostile = [("id", "\x1b[2J\nstate: running".to_owned())];
        assert_eq!(properties(&hostile), "id: \\u{1b}[2J\\nstate: running\n");
    }

    #[test]
    fn texts_of_a_server_stay_in_their_place() {
        let hostile = "\x1b[2Jx\nforged  running\u{9b}";
        let shown = r"\u{1b}[2Jx\nforged  running\u{9b}";
        assert_eq!(cells(&[hostile.to_owned()]), [shown]);
        let failure = Failure::refused(hostile).with_cure(hostile);
        assert_eq!(failure.to_string(), format!("{shown}\n  {shown}"));
    }
}
