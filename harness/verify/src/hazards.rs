//! `cube-bench verify clone-hazards`: what two sandboxes of one memory image must not share, and what forks must share.
//!
//! ```text
//! list ─► stage: two clones of a template · two forks of a parent · one paused sandbox ─► answers
//!                                                                    evaluate (pure) ◄──┘ ─► findings ─► report
//! ```
//! The suite uses only E2B's public interface, so it can verify any endpoint. A hazard that could not be tried is not a
//! pass.

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
    setup::{DOMAIN, Setup, VerifyError, api_of, key_from_environment},
};
pub use finding::{Between, Finding, Findings, HazardResult, Mode, Weight};

/// Sandboxes of each template that the suite's server keeps ready, so that some clones come from the warm pool.
const WARM: u32 = 2;
/// Lifetime of each sandbox, in seconds.
const LIFETIME_S: u32 = 900;

/// Options of the suite.
#[derive(Clone, Debug)]
pub struct HazardSpec {
    pub setup: Setup,
    /// URL of an endpoint that already runs; its key is `E2B_API_KEY`. `None`: the suite starts a server.
    pub target: Option<String>,
    /// Data plane of the target, with the placeholders `{id}` and `{port}`. `None`: the target's own address.
    pub sandbox_url: Option<String>,
    pub mode: Mode,
}

/// Runs the suite.
///
/// # Errors
/// Returns a [`VerifyError`] if the suite cannot start, or if the endpoint does not create the sandboxes to compare. A
/// hazard that is found is a finding, not an error.
pub fn run(spec: &HazardSpec) -> Result<Findings, VerifyError> {
    let hazards = list::load()?;
    let account = |api| Account {
        api,
        template: spec.setup.template.clone(),
        lifetime_s: LIFETIME_S,
    };
    let (findings, endpoint) = match &spec.target {
        Some(url) => {
            let account = account(Api {
                control: Endpoint::parse(url)?,
                sandbox_url: spec.sandbox_url.clone(),
                key: key_from_environment()?,
                timeout: probe::TIMEOUT,
            });
            (stage::run(&account, &hazards, spec.mode)?, url.clone())
        }
        None => {
            let dir = spec.setup.run_dir()?;
            let mut options = spec.setup.server(WARM)?;
            options.domain = Some(DOMAIN.to_owned());
            let server = LocalServer::start(dir.path(), options)?;
            let account = account(api_of(&server, probe::TIMEOUT));
            let own = "cube-api of the suite's own".to_owned();
            (stage::run(&account, &hazards, spec.mode)?, own)
        }
    };
    Ok(Findings {
        format: report::FORMAT,
        endpoint,
        template: spec.setup.template.clone(),
        findings,
    })
}
