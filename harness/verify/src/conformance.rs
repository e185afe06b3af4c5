//! `cube-bench verify e2b`: checks that an endpoint supports everything the official SDKs can do.
//!
//! ```text
//! features ─┬─► SDK × feature ─► suite (one process for each SDK, with time limits) ─► cases ─► report
//! sdk ──────┘
//! ```
//! The cases are programs that use the SDKs, in `harness/verify/conformance`. This module starts them, limits their
//! time and collects their results. A case that exceeds its limit is killed, and a case that was not run is not a pass.

mod address;
pub mod features;
mod registry;
pub mod sdk;
mod suite;

use std::{fs, path::Path, sync::Mutex, thread, time::Instant};

use testbed::{
    leftovers::RunDir,
    server::{LocalServer, Tls},
};

use crate::{
    report::{Case, Report, Suite, Verdict},
    setup::{DOMAIN, Setup, VerifyError, at, key_from_environment},
};
use address::{Address, SecureAddress};
use features::{Area, Feature};
use registry::Registries;
use sdk::Sdk;

/// Sandboxes that the suite's server keeps ready.
const WARM: u32 = 4;
/// Concurrent builds. Builds from Dockerfiles with a start command mostly wait, because the SDKs give the command
/// 20 s.
const BUILDS: [&str; 2] = ["--max-builds", "4"];

/// Options of the suite.
#[derive(Clone, Debug)]
pub struct ConformanceSpec {
    pub setup: Setup,
    /// URL of a running endpoint; its key is `E2B_API_KEY`. `None`: the suite starts a server.
    pub api_url: Option<String>,
    /// Names of SDKs; empty: all.
    pub sdks: Vec<String>,
    /// The area whose features are verified if `features` is empty.
    pub area: Area,
    /// Names of features; empty: all of the area.
    pub features: Vec<String>,
    /// SDKs that run at the same time.
    pub jobs: usize,
}

/// Runs the suite.
///
/// # Errors
/// Returns a [`VerifyError`] if a name is unknown or the suite cannot start. The result of a case is a verdict, not
/// an error.
pub fn run(spec: &ConformanceSpec) -> Result<Report, VerifyError> {
    let begun = Instant::now();
    let features = features::load()?;
    let mut features = select("feature", features, &spec.features, |f| f.name.clone())?;
    features.retain(|feature| spec.api_url.is_none() || !(feature.own_server || feature.registry));
    features.retain(|feature| !spec.features.is_empty() || feature.area == spec.area);
    let sdks = select("SDK", Sdk::all(), &spec.sdks, Sdk::name)?;
    let run_dir = spec.setup.run_dir()?;
    let registries = if features.iter().any(|feature| feature.registry) {
        Registries::start(&run_dir.path().join("registry"))?
    } else {
        None
    };
    let (server, mut address) = endpoint(spec, &run_dir, registries.as_ref())?;
    let secure = if features.iter().any(|feature| feature.own_server) {
        let dir = run_dir.path().join("secure");
        Some(start_server(
            &spec.setup,
            &dir,
            Tls::PrivateAuthority,
            0,
            Vec::new(),
        )?)
    } else {
        None
    };
    address.secure = secure.as_ref().map(SecureAddress::of);
    let cases = run_all(spec, &sdks, &features, &address, run_dir.path());
    let mut cases = in_order(&features, &sdks, cases);
    if cases.is_empty() {
        let why = "none of these SDKs has a case for any of these features";
        cases.push(Case::new("none", "cases", "").judged(Verdict::Fail, [why]));
    }
    let target = server.is_none().then_some(address.url);
    Ok(Report::new(Suite::E2b, target, cases, begun, ()))
}

/// Keeps the entries of `all` that `names` lists, or all of them if `names` is empty. Fails if a name is unknown.
fn select<T>(
    kind: &'static str,
    all: Vec<T>,
    names: &[String],
    name_of: impl Fn(&T) -> String,
) -> Result<Vec<T>, VerifyError> {
    let known: Vec<String> = all.iter().map(&name_of).collect();
    if let Some(name) = names.iter().find(|name| !known.contains(name)) {
        return Err(VerifyError::Unknown {
            kind,
            name: name.clone(),
            known: known.join(", "),
        });
    }
    let is_selected = |entry: &T| names.is_empty() || names.contains(&name_of(entry));
    Ok(all.into_iter().filter(is_selected).collect())
}

/// The endpoint in `spec`, or the endpoint of a new server, which lives as long as the returned handle.
fn endpoint(
    spec: &ConformanceSpec,
    run_dir: &RunDir,
    registries: Option<&Registries>,
) -> Result<(Option<LocalServer>, Address), VerifyError> {
    let template = spec.setup.template.clone();
    if let Some(url) = &spec.api_url {
        let address = Address {
            url: url.trim_end_matches('/').to_owned(),
            key: key_from_environment()?,
            template,
            secure: None,
            images: None,
        };
        return Ok((None, address));
    }
    let mut options = BUILDS.map(str::to_owned).to_vec();
    options.extend(registries.into_iter().flat_map(Registries::server_options));
    let server = start_server(&spec.setup, run_dir.path(), Tls::Off, WARM, options)?;
    let address = Address {
        url: server.endpoint().to_string(),
        key: server.key().to_owned(),
        template,
        secure: None,
        images: registries.map(Registries::image_names),
    };
    Ok((Some(server), address))
}

fn start_server(
    setup: &Setup,
    dir: &Path,
    tls: Tls,
    warm: u32,
    options: Vec<String>,
) -> Result<LocalServer, VerifyError> {
    fs::create_dir_all(dir).map_err(at(dir))?;
    let mut server = setup.server(warm)?;
    server.domain = Some(DOMAIN.to_owned());
    server.tls = tls;
    server.options = options;
    Ok(LocalServer::start(dir, server)?)
}

/// Runs up to `spec.jobs` SDKs at the same time, each in one process at a time.
fn run_all(
    spec: &ConformanceSpec,
    sdks: &[Sdk],
    features: &[Feature],
    address: &Address,
    home: &Path,
) -> Vec<Case> {
    let waiting = Mutex::new(sdks.iter());
    let work = || {
        let mut cases = Vec::new();
        loop {
            let next = waiting.lock().ok().and_then(|mut sdks| sdks.next());
            let Some(sdk) = next else { return cases };
            let dir = spec.setup.artifacts.join("sdk");
            cases.extend(suite::run(sdk, &dir, features, address, home));
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..spec.jobs.max(1)).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| match worker.join() {
                Ok(cases) => cases,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    })
}

fn in_order(features: &[Feature], sdks: &[Sdk], mut cases: Vec<Case>) -> Vec<Case> {
    let place = |case: &Case| {
        (
            features.iter().position(|f| f.name == case.name),
            sdks.iter().position(|s| s.name() == case.class),
        )
    };
    cases.sort_by_key(place);
    cases
}
