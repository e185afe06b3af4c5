//! Scenario keys replaced on the command line: `--set KEY=VALUE`.

use std::str::FromStr;

use toml::{Table, Value};

/// A key with its new value.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Tables from the outermost, then the key.
    path: Vec<String>,
    value: Value,
    text: String,
}

/// The text is not `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not KEY=VALUE, such as rounds=5 or arrival.kind=burst")]
pub struct BadChange {
    text: String,
}

impl FromStr for Change {
    type Err = BadChange;

    /// A value that is not valid TOML is taken as a string.
    fn from_str(text: &str) -> Result<Self, BadChange> {
        let bad = || BadChange {
            text: text.to_owned(),
        };
        let (key, value) = text.split_once('=').ok_or_else(bad)?;
        let path: Vec<String> = key.trim().split('.').map(str::to_owned).collect();
        if path.iter().any(String::is_empty) {
            return Err(bad());
        }
        let value = value.trim();
        let typed: Option<Table> = format!("v = {value}").parse().ok();
        let typed = typed.filter(|table| table.len() == 1);
        let typed = typed.and_then(|mut table| table.remove("v"));
        Ok(Self {
            path,
            value: typed.unwrap_or_else(|| Value::String(value.to_owned())),
            text: text.to_owned(),
        })
    }
}

impl Change {
    /// The text as typed.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Sets the key. A value on its path that is not a table is replaced. Whether the key exists is checked with
    /// the rest of the scenario.
    pub(super) fn apply(&self, scenario: &mut Table) {
        let Some((key, tables)) = self.path.split_last() else {
            return;
        };
        let mut at = scenario;
        for name in tables {
            let entry = at
                .entry(name.clone())
                .or_insert_with(|| Value::Table(Table::new()));
            if !entry.is_table() {
                *entry = Value::Table(Table::new());
            }
            let Value::Table(inner) = entry else {
                return;
            };
            at = inner;
        }
        at.insert(key.clone(), self.value.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::parse_changed;

    #[test]
    fn values_are_typed_and_replace_those_of_the_file() {
        let changes = [
            "rounds=7",
            "exec.argv=[\"/bin/true\"]",
            "hold.until = exec",
            "exec.expect_stdout=\"\"",
            "name=a=b",
        ];
        let changes = changes.map(|text| text.parse().unwrap());
        let scenario = parse_changed("t", "rounds = 2\n[exec]\nuser = \"user\"", &changes);
        let scenario = scenario.unwrap();
        assert_eq!(scenario.rounds, 7);
        assert_eq!(scenario.exec.argv, ["/bin/true"]);
        assert_eq!(scenario.exec.user, "user");
        assert_eq!(scenario.exec.expect_stdout, "");
        assert_eq!(scenario.name, "a=b");
        let unknown = parse_changed("t", "", &["ruonds=7".parse().unwrap()]);
        assert!(unknown.unwrap_err().to_string().contains("`rounds`"));
        for bad in ["rounds", "=7", "a..b=1"] {
            assert!(bad.parse::<Change>().is_err(), "{bad}");
        }
    }
}
