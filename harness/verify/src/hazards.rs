//! `cube-bench verify clone-hazards`: checks the state that clones of one memory image must not share, and the
//! state that forks must share.
//!
//! ```text
//! list ─► stage: two clones of a template · two forks of a parent · one paused sandbox ─► answers
//!                                                                    evaluate (pure) ◄──┘ ─► findings ─► report
//! ```
//! The suite uses only E2B's public interface, so it can verify any endpoint. A hazard that could not be tried is not a
//! pass.

mod build;
mod clock;
mod evaluate;
mod finding;
mod list;
mod probe;
pub mod report;
mod stage;

use testbed::{api::Api, endpoint::Endpoint, server::LocalServer};

use crate::{
    sandbox::Account,
    setup::{DOMAIN, Setup, VerifyError, api_of},
};
pub use finding::{Between, Finding, Findings, HazardResult, Mode, OfTemplate, Weight};

/// Sandboxes of each template that the suite's server keeps ready, so that some clones come from the warm pool.
const WARM: u32 = 2;
/// Lifetime of each sandbox, in seconds.
const LIFETIME_S: u32 = 900;

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
/// or sandboxes to compare. A hazard is a finding, not an error.
pub fn run(spec: &HazardSpec) -> Result<Findings, VerifyError> {
    let (templates, endpoint) = match &spec.target {
        Some(target) => {
            let api = Api {
                control: Endpoint::parse(&target.url)?,
                sandbox_url: target.sandbox_url.clone(),
                key: target.key.clone(),
                timeout: probe::TIMEOUT,
            };
            (verify(spec, &api)?, target.url.clone())
        }
        None => {
            let dir = spec.setup.run_dir()?;
            let mut options = spec.setup.server(WARM)?;
            options.domain = Some(DOMAIN.to_owned());
            let server = LocalServer::start(dir.path(), options)?;
            let own = "cube-api started by the suite".to_owned();
            (verify(spec, &api_of(&server, probe::TIMEOUT))?, own)
        }
    };
    Ok(Findings {
        format: report::FORMAT,
        endpoint,
        templates,
    })
}

fn verify(spec: &HazardSpec, api: &Api) -> Result<Vec<OfTemplate>, VerifyError> {
    let account = |template: &str| Account {
        api: api.clone(),
        template: template.to_owned(),
        lifetime_s: LIFETIME_S,
    };
    let verify = |template: &str, ask: Option<&str>| {
        let mut hazards = list::load()?;
        hazards.extend(ask.map(list::asked));
        Ok(OfTemplate {
            template: template.to_owned(),
            findings: stage::run(&account(template), &hazards, spec.mode)?,
        })
    };
    let builder = account(&spec.setup.template);
    match &spec.templates {
        Templates::One { ask } => Ok(vec![verify(&spec.setup.template, ask.as_deref())?]),
        Templates::All => {
            let names = build::all(&builder)?;
            names.iter().map(|name| verify(name, None)).collect()
        }
        Templates::Built => {
            let of = |kind: build::Kind| {
                let template = build::build(&builder, &kind)?;
                verify(&template.name, kind.ask)
            };
            build::kinds().into_iter().map(of).collect()
        }
    }
}
