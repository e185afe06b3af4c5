//! The workflows in `ci/workflows`: they parse, follow the rules of `ci/README.md`, and call commands that exist.

use std::{collections::BTreeMap, fs, path::Path};

use clap::Parser;
use serde::Deserialize;
use serde_yaml_ng::Value;

use super::sources::{Sources, entries, file_name};
use crate::{Cli, Task, workspace::Workspace};

#[derive(Debug, Deserialize)]
struct Workflow {
    permissions: BTreeMap<String, String>,
    concurrency: BTreeMap<String, Value>,
    jobs: BTreeMap<String, Job>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Job {
    runs_on: Value,
    timeout_minutes: u32,
    #[serde(default)]
    strategy: Strategy,
    steps: Vec<Step>,
}

#[derive(Debug, Default, Deserialize)]
struct Strategy {
    #[serde(default)]
    matrix: BTreeMap<String, Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct Step {
    #[serde(rename = "if")]
    condition: Option<String>,
    uses: Option<String>,
    run: Option<String>,
}

impl Job {
    /// The scripts of all steps. A script that uses a key of the matrix appears once for each value of the key.
    fn scripts(&self) -> Vec<String> {
        let mut scripts = Vec::new();
        for run in self.steps.iter().filter_map(|step| step.run.as_ref()) {
            scripts.extend(self.substitute(run));
        }
        scripts
    }

    fn substitute(&self, script: &str) -> Vec<String> {
        let mut values: Vec<(String, String)> = Vec::new();
        for (key, entries) in &self.strategy.matrix {
            for entry in entries {
                match entry {
                    Value::String(value) => values.push((key.clone(), value.clone())),
                    Value::Mapping(map) => values.extend(map.iter().filter_map(|(key, value)| {
                        Some((key.as_str()?.to_owned(), value.as_str()?.to_owned()))
                    })),
                    _ => {}
                }
            }
        }
        let substituted: Vec<String> = values
            .iter()
            .filter(|(key, _)| script.contains(&placeholder(key)))
            .map(|(key, value)| script.replace(&placeholder(key), value))
            .collect();
        if substituted.is_empty() {
            vec![script.to_owned()]
        } else {
            substituted
        }
    }

    fn is_self_hosted(&self) -> bool {
        matches!(&self.runs_on, Value::Sequence(labels) if labels.contains(&"self-hosted".into()))
    }

    fn sweeps_always(&self) -> bool {
        self.steps.iter().any(|step| {
            let always = step.condition.as_deref() == Some("always()");
            always
                && step
                    .run
                    .as_ref()
                    .is_some_and(|run| run.contains("cube-bench sweep"))
        })
    }
}

fn placeholder(key: &str) -> String {
    format!("${{{{ matrix.{key} }}}}")
}

fn workflows(root: &Path) -> Vec<(String, Workflow)> {
    let files = entries(&root.join("ci/workflows"));
    let parse = |path: &std::path::PathBuf| {
        let name = file_name(path);
        let text = fs::read_to_string(path).expect(&name);
        let workflow = serde_yaml_ng::from_str(&text);
        (
            name.clone(),
            workflow.unwrap_or_else(|error| panic!("{name}: {error}")),
        )
    };
    files.iter().map(parse).collect()
}

/// The arguments after `program` in each of its calls in a script.
fn calls(script: &str, program: &str) -> Vec<Vec<String>> {
    let mut calls = Vec::new();
    for command in script.split(['\n', ';', '|', '&']) {
        let Some((_, arguments)) = command.split_once(program) else {
            continue;
        };
        let words = arguments.split_whitespace();
        calls.push(
            words
                .map(|word| word.trim_matches('"').to_owned())
                .collect(),
        );
    }
    calls
}

#[test]
fn workflows_pin_actions_and_bound_every_job() {
    let workspace = Workspace::locate().expect("a checkout");
    for (name, workflow) in workflows(workspace.root()) {
        let read_only = BTreeMap::from([("contents".to_owned(), "read".to_owned())]);
        assert_eq!(workflow.permissions, read_only, "{name}");
        assert!(workflow.concurrency.contains_key("group"), "{name}");
        for (id, job) in &workflow.jobs {
            assert!(job.timeout_minutes > 0, "{name}: {id}");
            for uses in job.steps.iter().filter_map(|step| step.uses.as_ref()) {
                let (_, commit) = uses.split_once('@').unwrap_or_default();
                let pinned = commit.len() == 40 && commit.bytes().all(|b| b.is_ascii_hexdigit());
                assert!(pinned, "{name}: {id}: {uses} is not pinned to a commit");
            }
            let starts_vms = job
                .scripts()
                .iter()
                .any(|script| script.contains("cargo xtask") && !script.contains("xtask fuzz"));
            if job.is_self_hosted() && starts_vms {
                assert!(job.sweeps_always(), "{name}: {id} does not sweep");
            }
        }
    }
}

#[test]
fn workflows_call_commands_that_exist() {
    let workspace = Workspace::locate().expect("a checkout");
    let root = workspace.root();
    let sources = Sources::load(root);
    let mut xtask_calls = 0;
    for (name, workflow) in workflows(root) {
        for script in workflow.jobs.values().flat_map(Job::scripts) {
            for call in calls(&script, "cargo xtask ") {
                let arguments = std::iter::once("xtask").chain(call.iter().map(String::as_str));
                let cli = Cli::try_parse_from(arguments)
                    .unwrap_or_else(|error| panic!("{name}: cargo xtask {call:?}: {error}"));
                if let Task::Bench { scenario, .. } = cli.task {
                    assert!(
                        root.join(&scenario).is_file(),
                        "{name}: {}",
                        scenario.display()
                    );
                }
                xtask_calls += 1;
            }
            for call in calls(&script, "bin/cube-bench ") {
                let command = call.first().map(String::as_str).unwrap_or_default();
                if command == "]" {
                    // `[ -x target/cube/bin/cube-bench ]` only tests whether the program exists.
                    continue;
                }
                let variant = capitalized(command);
                assert!(
                    sources.defines(&format!("harness::{variant}")),
                    "{name}: cube-bench has no command {command}"
                );
            }
        }
    }
    assert!(
        xtask_calls > 10,
        "found only {xtask_calls} calls of cargo xtask"
    );
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}
