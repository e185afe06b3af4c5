//! The deserialized forms of turns and parent steps, and their validation.

use serde::Deserialize;

use super::{ExecSpec, ParentStep, TurnSpec, network::ExchangeConfig};

/// A parent step: either `upload` and `to`, or exactly one of `argv` and `cell` with `expect_stdout`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ParentConfig {
    #[serde(default)]
    argv: Vec<String>,
    #[serde(default)]
    cell: String,
    #[serde(default)]
    expect_stdout: String,
    #[serde(default)]
    upload: String,
    #[serde(default)]
    to: String,
}

/// The keys of a turn or parent step that describe a command or a cell. Not yet validated.
struct StepConfig {
    argv: Vec<String>,
    cell: String,
    expect_stdout: String,
}

/// A turn, or `times` consecutive turns with the same keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TurnConfig {
    name: String,
    #[serde(default)]
    argv: Vec<String>,
    #[serde(default)]
    cell: String,
    #[serde(default)]
    expect_stdout: String,
    #[serde(default = "once")]
    times: usize,
    #[serde(default)]
    exchange: String,
    #[serde(default)]
    count: Option<u32>,
    #[serde(default)]
    repeat: Option<u32>,
    #[serde(default)]
    amount: String,
    #[serde(default)]
    every: String,
}

fn once() -> usize {
    1
}

impl ParentConfig {
    pub(super) fn check(self, exec: &ExecSpec) -> Result<ParentStep, String> {
        if self.upload.is_empty() && self.to.is_empty() {
            let step = StepConfig {
                argv: self.argv,
                cell: self.cell,
                expect_stdout: self.expect_stdout,
            };
            return step.check("parent", exec).map(ParentStep::Run);
        }
        let also = !(self.argv.is_empty() && self.cell.is_empty() && self.expect_stdout.is_empty());
        if also || self.upload.is_empty() || !self.to.starts_with('/') {
            return Err(
                "parent: a step with upload needs an absolute path in `to` and no other key".into(),
            );
        }
        Ok(ParentStep::Upload {
            file: self.upload.into(),
            to: self.to,
        })
    }
}

impl StepConfig {
    /// Checks that exactly one of `argv` and `cell` is set. The user and the timeout come from `[exec]`.
    fn check(self, of: &str, exec: &ExecSpec) -> Result<ExecSpec, String> {
        if self.argv.is_empty() == self.cell.is_empty() {
            return Err(format!("{of} needs exactly one of argv and cell"));
        }
        Ok(ExecSpec {
            argv: self.argv,
            cell: Some(self.cell).filter(|cell| !cell.is_empty()),
            expect_stdout: self.expect_stdout,
            ..exec.clone()
        })
    }
}

impl StepConfig {
    /// Checks that an exchange has no command, cell or expected output. The timeout comes from `[exec]`.
    fn check_empty(self, of: &str, exec: &ExecSpec) -> Result<ExecSpec, String> {
        if !(self.argv.is_empty() && self.cell.is_empty() && self.expect_stdout.is_empty()) {
            return Err(format!(
                "{of} is an exchange and cannot have argv, cell or expect_stdout"
            ));
        }
        Ok(ExecSpec {
            argv: Vec::new(),
            cell: None,
            expect_stdout: String::new(),
            ..exec.clone()
        })
    }
}

impl TurnConfig {
    /// Returns `times` turns. Their names get the suffixes ` 1`, ` 2` and so on if there is more than one.
    pub(super) fn check(self, exec: &ExecSpec) -> Result<Vec<TurnSpec>, String> {
        let (name, times) = (self.name, self.times);
        if times == 0 || times > super::config::MAX_TURNS {
            return Err(format!(
                "turn {name:?}: times is {times}, it must lie between 1 and {}",
                super::config::MAX_TURNS
            ));
        }
        let of = format!("turn {name:?}");
        let typed = ExchangeConfig {
            exchange: self.exchange,
            count: self.count,
            repeat: self.repeat,
            amount: self.amount,
            every: self.every,
        };
        let exchange = typed.check(&of)?;
        let step = StepConfig {
            argv: self.argv,
            cell: self.cell,
            expect_stdout: self.expect_stdout,
        };
        let exec = match exchange {
            None => step.check(&of, exec)?,
            Some(_) => step.check_empty(&of, exec)?,
        };
        let numbered = |number| match times {
            1 => name.clone(),
            _ => format!("{name} {number}"),
        };
        Ok((1..=times)
            .map(|number| TurnSpec {
                name: numbered(number),
                exec: exec.clone(),
                exchange,
            })
            .collect())
    }
}
