//! `cube doctor`: lists what this host lacks for a server, each with its remedy.
//!
//! The checks repeat those that the server and the VMM perform when they start, in words for people, and change
//! nothing: they do not connect to a server that systemd would start for a connection. They read /proc, /sys and
//! the files of the installation, and start only the VMM's own probe and systemctl.

mod host;
mod options;
mod selftest;
mod service;

pub(crate) use host::beside;

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use options::Options;

use crate::{context::Context, failure::Failure};

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// State directory of the server [default: from its configuration]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Configuration file of the server [default: /etc/cube/cube.toml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Also start, clone, measure and attack sandboxes on this host for some minutes, and write the results to
    /// FILE, which contains no secrets
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "cube-selftest.json")]
    selftest: Option<PathBuf>,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// A server runs without it, but with restrictions.
    Warning,
    /// A server with the default options does not run.
    Missing,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    /// Finding of the check.
    found: String,
    /// Remedy. `None` if nothing needs to be done.
    cure: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self {
            check,
            verdict: Verdict::Ok,
            found: found.into(),
            cure: None,
        }
    }

    fn missing(check: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Self {
        Self {
            check,
            verdict: Verdict::Missing,
            found: found.into(),
            cure: Some(cure.into()),
        }
    }

    /// Like [`Finding::missing`], for something that a server can run without.
    fn warning(check: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Warning,
            ..Self::missing(check, found, cure)
        }
    }
}

/// # Errors
/// Returns a [`Failure`] after the findings are printed if something that a server needs is missing.
pub(crate) fn run(context: &Context, args: &DoctorArgs) -> Result<(), Failure> {
    let (options, unusable) = Options::load(args);
    let mut findings = host::findings(&options.state);
    findings.extend(service::findings(context, &options)?);
    findings.extend(options.denied_addresses());
    let findings = unusable.into_iter().chain(findings);
    let findings: Vec<_> = findings.map(|found| options.applied(found)).collect();
    let columns = ["RESULT", "CHECK", "FOUND"];
    context.format.list("findings", &findings, &columns, row)?;
    if let Some(file) = &args.selftest {
        return selftest::run(&options, findings, file);
    }
    let missing = |found: &&Finding| found.verdict == Verdict::Missing;
    match findings.iter().filter(missing).count() {
        0 => Ok(()),
        count => Err(
            Failure::host(format!("{count} of {} checks failed", findings.len()))
                .with_cure("fix the lines that begin with MISSING, then run `cube doctor` again"),
        ),
    }
}

fn row(finding: &Finding) -> Vec<String> {
    let result = match finding.verdict {
        Verdict::Ok => "ok",
        Verdict::Warning => "warning",
        Verdict::Missing => "MISSING",
    };
    let found = match &finding.cure {
        Some(cure) => format!("{}: {cure}", finding.found),
        None => finding.found.clone(),
    };
    vec![result.to_owned(), finding.check.to_owned(), found]
}
