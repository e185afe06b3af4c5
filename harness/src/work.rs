//! Sets of work: the first commands of new sandboxes, chosen from a file by the seed of the scenario.
//!
//! A warm-up before a snapshot makes its cell cheaper in every clone. `scenarios/work/training.toml` lists the work
//! of warm-ups; it is *trained*. All other work is *unseen*, and only unseen work shows how long a customer waits.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use model::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::scenario::ExecSpec;

const TRAINING: &str = include_str!("../../scenarios/work/training.toml");
/// Maximum number of items in a file. A larger file is treated as a mistake.
const MOST_ITEMS: usize = 10_000;

/// A validated work file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkSet {
    /// Path of the file as given.
    pub file: PathBuf,
    /// SHA-256 of the file, 64 lower-case hex digits.
    pub sha256: String,
    pub kind: WorkKind,
    /// At least one item; ids are unique.
    pub items: Vec<WorkItem>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkItem {
    pub id: String,
    /// Modules that the item loads; for commands, programs that it runs.
    pub modules: Vec<String>,
    pub exec: ExecSpec,
}

/// How items are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkKind {
    /// Cells of the interpreter's Python.
    Python,
    /// Cells of the interpreter's JavaScript.
    Javascript,
    /// Programs that the agent starts.
    Command,
}

/// A work file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    #[error("cannot read the work file {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot parse the work file {path}")]
    Toml {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("work file {path}: {what}")]
    Value { path: PathBuf, what: String },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetConfig {
    kind: WorkKind,
    items: Vec<ItemConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ItemConfig {
    id: String,
    /// For readers of the file.
    #[serde(rename = "source")]
    _source: String,
    modules: Vec<String>,
    #[serde(default)]
    text: String,
    #[serde(default)]
    argv: Vec<String>,
    expect: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TrainingConfig {
    items: Vec<TrainedConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TrainedConfig {
    #[serde(rename = "source")]
    _source: String,
    kind: WorkKind,
    #[serde(default)]
    text: String,
    #[serde(default)]
    argv: Vec<String>,
}

/// Reads and validates a work file. User and timeout of the items are those of `like`.
///
/// # Errors
/// Returns [`WorkError`] if the file cannot be read, is not TOML of the documented form, or contains an item that
/// cannot be run.
pub fn load(path: &Path, like: &ExecSpec) -> Result<WorkSet, WorkError> {
    let text = std::fs::read_to_string(path).map_err(|source| WorkError::Read {
        path: path.to_owned(),
        source,
    })?;
    let config: SetConfig = toml::from_str(&text).map_err(|source| WorkError::Toml {
        path: path.to_owned(),
        source: Box::new(source),
    })?;
    let invalid = |what| WorkError::Value {
        path: path.to_owned(),
        what,
    };
    let count = config.items.len();
    if count == 0 || count > MOST_ITEMS {
        return Err(invalid(format!(
            "it has {count} items, it must have between 1 and {MOST_ITEMS}"
        )));
    }
    let mut ids = BTreeSet::new();
    if let Some(twice) = config.items.iter().find(|item| !ids.insert(&item.id)) {
        return Err(invalid(format!("the id {:?} occurs twice", twice.id)));
    }
    let items = config.items.into_iter();
    Ok(WorkSet {
        file: path.to_owned(),
        sha256: hex(&Sha256::digest(&text)),
        kind: config.kind,
        items: items
            .map(|item| item.check(config.kind, like))
            .collect::<Result<_, _>>()
            .map_err(invalid)?,
    })
}

impl ItemConfig {
    fn check(self, kind: WorkKind, like: &ExecSpec) -> Result<WorkItem, String> {
        let id = self.id;
        let (needed, present) = match kind {
            WorkKind::Command => ("argv", !self.argv.is_empty() && self.text.is_empty()),
            WorkKind::Python | WorkKind::Javascript => {
                ("text", self.argv.is_empty() && !self.text.is_empty())
            }
        };
        if id.is_empty() || !present {
            return Err(format!(
                "item {id:?} of kind {kind:?} needs an id and {needed}, and no other form of work"
            ));
        }
        Ok(WorkItem {
            id,
            modules: self.modules,
            exec: ExecSpec {
                argv: self.argv,
                cell: Some(self.text).filter(|text| !text.is_empty()),
                language: kind.language().map(str::to_owned),
                expect_stdout: self.expect,
                ..like.clone()
            },
        })
    }
}

impl WorkKind {
    /// Name of the interpreter's language; `None` for commands.
    #[must_use]
    pub fn language(self) -> Option<&'static str> {
        match self {
            Self::Python => Some("python"),
            Self::Javascript => Some("javascript"),
            Self::Command => None,
        }
    }

    /// A cell that prints the modules loaded in a new sandbox, one per line; `None` for commands.
    #[must_use]
    pub fn list_modules(self) -> Option<&'static str> {
        match self {
            Self::Python => Some("import sys; print('\\n'.join(sys.modules))"),
            Self::Javascript => Some(
                "console.log(process.moduleLoadList.map((m) => m.replace('NativeModule ', '')).join('\\n'))",
            ),
            Self::Command => None,
        }
    }
}

/// Identifies work independently of its layout: SHA-256 of its language and its words.
fn identity(exec: &ExecSpec) -> String {
    let mut hash = Sha256::new();
    match &exec.cell {
        Some(code) => {
            hash.update(exec.language.as_deref().unwrap_or("python"));
            for word in code.split_whitespace() {
                hash.update([0]);
                hash.update(word);
            }
        }
        None => {
            for argument in &exec.argv {
                hash.update([1]);
                hash.update(argument.trim());
            }
        }
    }
    hex(&hash.finalize())
}

/// The training set.
struct Training {
    identities: BTreeSet<String>,
    /// Names of the programs that warm-ups start.
    programs: BTreeSet<String>,
}

#[expect(
    clippy::expect_used,
    reason = "the text is a part of the program, and a test parses it"
)]
static TRAINED: LazyLock<Training> = LazyLock::new(|| {
    let config: TrainingConfig = toml::from_str(TRAINING).expect("the training set is valid TOML");
    let execs: Vec<ExecSpec> = config.items.into_iter().map(TrainedConfig::exec).collect();
    Training {
        identities: execs.iter().map(identity).collect(),
        programs: execs
            .iter()
            .filter_map(|exec| exec.argv.first())
            .filter_map(|path| Some(Path::new(path).file_name()?.to_str()?.to_owned()))
            .collect(),
    }
});

impl TrainedConfig {
    fn exec(self) -> ExecSpec {
        ExecSpec {
            argv: self.argv,
            cell: Some(self.text).filter(|text| !text.is_empty()),
            language: self.kind.language().map(str::to_owned),
            user: String::new(),
            expect_stdout: String::new(),
            timeout: std::time::Duration::ZERO,
        }
    }
}

/// Whether a warm-up of the shipped templates, a recording of a working set or a warm slot has run this work.
#[must_use]
pub fn is_trained(exec: &ExecSpec) -> bool {
    TRAINED.identities.contains(&identity(exec))
}

/// Names of the programs that warm-ups of the shipped templates start.
#[must_use]
pub fn trained_programs() -> Vec<String> {
    TRAINED.programs.iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario;

    fn like() -> ExecSpec {
        scenario::parse("t", "").unwrap().exec
    }

    fn held_out() -> Vec<WorkSet> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/work/held-out");
        ["python", "javascript", "commands"]
            .map(|name| load(&dir.join(format!("{name}.toml")), &like()).unwrap())
            .into()
    }

    #[test]
    fn held_out_work_is_disjoint_from_the_training_set() {
        let sets = held_out();
        let counts: Vec<usize> = sets.iter().map(|set| set.items.len()).collect();
        assert!(
            counts[0] >= 30 && counts[1] >= 10 && counts[2] >= 15,
            "{counts:?}"
        );
        for item in sets.iter().flat_map(|set| &set.items) {
            assert!(
                !is_trained(&item.exec),
                "{} is in a warm-up: add a separate training item",
                item.id
            );
        }
    }

    /// A changed set is a new set: numbers from before and after the change cannot be compared.
    #[test]
    fn the_held_out_set_is_the_one_that_was_committed() {
        let sums = include_str!("../../scenarios/work/held-out/SHA256SUMS");
        for set in held_out() {
            let name = set.file.file_name().unwrap().to_str().unwrap().to_owned();
            assert!(
                sums.contains(&format!("{}  {name}\n", set.sha256)),
                "{name} changed"
            );
        }
    }

    #[test]
    fn trained_work_is_found_whatever_its_layout() {
        let cell = |code: &str| ExecSpec {
            cell: Some(code.to_owned()),
            ..like()
        };
        assert!(is_trained(&cell("1+1")));
        assert!(is_trained(&cell("  1+1\n")));
        assert!(!is_trained(&cell("1+2")));
        let javascript = ExecSpec {
            language: Some("javascript".into()),
            ..cell("print('hello')")
        };
        assert!(!is_trained(&javascript), "that is a Python warm-up");
        assert!(is_trained(&like()), "the default command is the probe");
        let argv = ["/usr/bin/python3", "-c", "print(2)"].map(str::to_owned);
        let command = ExecSpec {
            argv: argv.into(),
            ..like()
        };
        assert!(!is_trained(&command));
        assert!(trained_programs().contains(&"git".to_owned()));
    }

    #[test]
    fn invalid_files_are_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |text: &str| {
            let path = dir.path().join("w.toml");
            std::fs::write(&path, text).unwrap();
            let error = load(&path, &like()).unwrap_err();
            model::chain(&error).replace(&path.display().to_string(), "w.toml")
        };
        insta::assert_snapshot!(refused("kind = 'python'\nitems = []"), @"work file w.toml: it has 0 items, it must have between 1 and 10000");
        let item = "[[items]]\nid='a'\nsource='s'\nmodules=[]\nexpect=''\n";
        insta::assert_snapshot!(refused(&format!("kind='command'\n{item}text='1'\n")), @r#"work file w.toml: item "a" of kind Command needs an id and argv, and no other form of work"#);
        let valid = format!("{item}text='1'\n");
        insta::assert_snapshot!(refused(&format!("kind='python'\n{valid}{valid}")), @r#"work file w.toml: the id "a" occurs twice"#);
        assert!(refused("kind = 'ruby'\nitems = []").contains("unknown variant"));
        assert!(load(Path::new("/no/such"), &like()).is_err());
    }
}
