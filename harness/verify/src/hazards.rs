//! `cube-bench verify clone-hazards`: checks the state that clones of one memory image must not share, and the
//! state that forks must share.
//!
//! ```text
//! list ─► stage: two clones of a template · two forks of a parent · one paused sandbox ─► answers
//!                                                                    evaluate (pure) ◄──┘ ─► cases ─► report
//! ```
//! The suite uses only E2B's public interface, so it can verify any endpoint. A hazard that could not be tried is not a
//! pass.

mod build;
mod clock;
mod evaluate;
mod list;
mod probe;
mod stage;

use std::time::Instant;

use testbed::{api::Api, endpoint::Endpoint, server::LocalServer};

use crate::{
    report::{Case, Report, Suite, Verdict},
    sandbox::Account,
    setup::{DOMAIN, Setup, VerifyError, api_of},
};

/// Sandboxes of each template that the suite's server keeps ready, so that some clones come from the warm pool.
const WARM: u32 = 2;
/// Lifetime of each sandbox, in seconds.
const LIFETIME_S: u32 = 900;

/// Whether the suite looks for hazards or causes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Look,
    /// Causes each hazard first, to test that the suite finds it.
    Sabotage,
}

/// A running endpoint.
#[derive(Clone, Debug)]
pub struct Target {
    pub url: String,
    pub key: String,
    /// Data plane, with the placeholders `{id}` and `{port}`. `None`: the target's own address.
    pub sandbox_url: Option<String>,
}

/// The templates that a run verifies.
#[derive(Clone, Debug)]
pub enum Templates {
    /// The template of [`Setup::template`], with the command that requests a random value from its start command's
    /// processes.
    One { ask: Option<String> },
    /// Every template of the endpoint that is ready.
    All,
    /// One template of each kind. The suite builds them and deletes them at the end.
    Built,
}

/// Options of the suite.
#[derive(Clone, Debug)]
pub struct HazardSpec {
    pub setup: Setup,
    /// `None`: the suite starts a server.
    pub target: Option<Target>,
    pub templates: Templates,
    pub mode: Mode,
}

/// Runs the suite.
///
/// # Errors
/// Returns a [`VerifyError`] if the suite cannot start, or if the endpoint does not create the templates
/// or sandboxes to compare. A hazard is a verdict, not an error.
pub fn run(spec: &HazardSpec) -> Result<Report, VerifyError> {
    let begun = Instant::now();
    let cases = match &spec.target {
        Some(target) => {
            let api = Api {
                control: Endpoint::parse(&target.url)?,
                sandbox_url: target.sandbox_url.clone(),
                key: target.key.clone(),
                timeout: probe::TIMEOUT,
            };
            verify(spec, &api)?
        }
        None => {
            let dir = spec.setup.run_dir()?;
            let mut options = spec.setup.server(WARM)?;
            options.domain = Some(DOMAIN.to_owned());
            let server = LocalServer::start(dir.path(), options)?;
            verify(spec, &api_of(&server, probe::TIMEOUT))?
        }
    };
    let target = spec.target.as_ref().map(|target| target.url.clone());
    Ok(Report::new(Suite::CloneHazards, target, cases, begun, ()))
}

/// The cases of all templates. The class of a case names the template and the compared sandboxes.
fn verify(spec: &HazardSpec, api: &Api) -> Result<Vec<Case>, VerifyError> {
    let account = |template: &str| Account {
        api: api.clone(),
        template: template.to_owned(),
        lifetime_s: LIFETIME_S,
    };
    let verify = |template: &str, ask: Option<&str>| {
        let mut hazards = list::load()?;
        hazards.extend(ask.map(list::asked));
        let mut cases = stage::run(&account(template), &hazards, spec.mode)?;
        if cases.is_empty() {
            let untried = Case::new("clones", "hazards", "").judged(Verdict::NotTried, ["no case"]);
            cases.push(untried);
        }
        for case in &mut cases {
            case.class = format!("{template}.{}", case.class);
        }
        Ok::<_, VerifyError>(cases)
    };
    let builder = account(&spec.setup.template);
    match &spec.templates {
        Templates::One { ask } => verify(&spec.setup.template, ask.as_deref()),
        Templates::All => {
            let mut cases = Vec::new();
            for name in build::all(&builder)? {
                cases.extend(verify(&name, None)?);
            }
            Ok(cases)
        }
        Templates::Built => {
            let mut cases = Vec::new();
            for kind in build::kinds() {
                let template = build::build(&builder, &kind)?;
                cases.extend(verify(&template.name, kind.ask)?);
            }
            Ok(cases)
        }
    }
}
