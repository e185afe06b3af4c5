//! Commands and cells: the first command, turns, and steps of a parent.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    config::positive,
    network::{ExchangeConfig, ExchangeSpec},
};

/// Maximum number of turns of a scenario; a turn with `times` counts that many times. A larger number is treated as a
/// typing mistake.
const MAX_TURNS: usize = 1000;

/// A command or a cell, with its expected output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// Program and arguments; may be empty if there is a cell.
    pub argv: Vec<String>,
    /// Code for the interpreter of the sandbox, which replaces `argv`.
    #[serde(default)]
    pub cell: Option<String>,
    /// Language of the cell; `None` uses the interpreter's default, Python.
    #[serde(default)]
    pub language: Option<String>,
    /// User inside the guest. Ignored for cells, which run as the user of the interpreter, and for the baseline, which
    /// runs as the user of the harness.
    pub user: String,
    /// Exact standard output expected; for a cell, its printed output followed by the text of its result.
    pub expect_stdout: String,
    /// Timeout from the request to the complete response.
    pub timeout: Duration,
}

impl ExecSpec {
    /// The command or the cell as text for messages.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.cell {
            Some(code) => format!("cell {code:?}"),
            None => format!("{:?}", self.argv),
        }
    }
}

/// A step that prepares a parent before it is forked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParentStep {
    /// Runs a command or a cell.
    Run(ExecSpec),
    /// Copies a file of this host into the sandbox when the round begins.
    Upload {
        /// Path on this host, relative to the current directory of the harness.
        file: PathBuf,
        /// Absolute path in the sandbox.
        to: String,
    },
}

/// A command, a cell or an exchange after the first command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnSpec {
    /// Name in reports.
    pub name: String,
    /// Command or cell; for an exchange, only the timeout applies.
    pub exec: ExecSpec,
    /// Traffic with a peer outside the sandbox, which replaces the command or cell.
    #[serde(default)]
    pub exchange: Option<ExchangeSpec>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExecConfig {
    argv: Vec<String>,
    cell: String,
    user: String,
    expect_stdout: String,
    timeout: String,
}

impl ExecConfig {
    pub(super) fn check(self) -> Result<ExecSpec, String> {
        if self.argv.is_empty() {
            return Err("exec.argv is empty, it must name a program".to_owned());
        }
        Ok(ExecSpec {
            argv: self.argv,
            cell: Some(self.cell).filter(|cell| !cell.is_empty()),
            language: None,
            user: self.user,
            expect_stdout: self.expect_stdout,
            timeout: positive("exec.timeout", &self.timeout)?,
        })
    }
}

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
            return step.check("mode.parent", exec).map(ParentStep::Run);
        }
        let also = !(self.argv.is_empty() && self.cell.is_empty() && self.expect_stdout.is_empty());
        if also || self.upload.is_empty() || !self.to.starts_with('/') {
            return Err(
                "mode.parent: a step with upload needs an absolute path in `to` and no other key"
                    .into(),
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
        if times == 0 || times > MAX_TURNS {
            return Err(format!(
                "turn {name:?}: times is {times}, it must lie between 1 and {}",
                MAX_TURNS
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

/// All turns of the scenario, with each configured turn repeated `times` times.
pub(super) fn turns(typed: Vec<TurnConfig>, exec: &ExecSpec) -> Result<Vec<TurnSpec>, String> {
    let mut turns = Vec::new();
    for turn in typed {
        turns.extend(turn.check(exec)?);
        if turns.len() > MAX_TURNS {
            return Err(format!("the scenario has more than {MAX_TURNS} turns"));
        }
    }
    Ok(turns)
}
