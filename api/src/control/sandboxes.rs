//! Creation, details, lists and termination of sandboxes.

use std::collections::BTreeMap;

use ::builds::catalog::Catalog;
use axum::{Extension, extract::State, routing::MethodFilter};
use envd::Timestamp;
use hyper::{HeaderMap, StatusCode, header::HeaderValue};
use pool::{OnTimeout, PauseMode, SandboxState as PoolState};
use rest::{
    ListedSandbox, NewLifecycle, NewSandbox, OnActivity, Sandbox, SandboxDetail, SandboxState,
};

use super::{
    app::App,
    body::{Body, OfSandbox},
    endpoint::{Access, Endpoint},
    error::ApiError,
    network::{self, OptionSource},
    paging::put_token,
    paging::{Page, Position},
    query::Query,
    spread::{
        Merge, Merging,
        Spread::{BySandbox, Create, List},
    },
    timeout::{TIMEOUT_S, timeout},
    timing, wire,
};
use crate::{
    auth::{Granted, Scope},
    json::Json,
    network::EgressConfig,
    registry::{NewLease, Token, View},
    traces,
};

const READ: Access = Access::Key(Scope::SandboxesRead);
const WRITE: Access = Access::Key(Scope::SandboxesWrite);

/// The timeout of a request to the older create route that names none, in seconds.
const OLD_TIMEOUT_S: u32 = 15;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post, delete) = (MethodFilter::GET, MethodFilter::POST, MethodFilter::DELETE);
    vec![
        Create.at(post, "/v2/sandboxes", WRITE, create),
        Create.at(post, "/sandboxes", WRITE, create_old),
        List(Merge::Pages).at(get, "/v2/sandboxes", READ, list),
        List(Merge::Latest).at(get, "/sandboxes", READ, list_old),
        BySandbox.at(get, "/sandboxes/{id}", READ, detail),
        BySandbox.at(delete, "/sandboxes/{id}", WRITE, kill),
    ]
}

type CreateAnswer = Result<(StatusCode, [(&'static str, String); 2], Json<Sandbox>), ApiError>;

/// Response header: whether the sandbox came from a warm slot (`warm`) or was restored for this request (`restored`).
/// Measurements must not mix the two.
const START: &str = "x-cube-start";

/// The newer route: the agent always requires an access token.
async fn create(State(app): State<App>, Body(mut body): Body<NewSandbox>) -> CreateAnswer {
    body.secure = None;
    create_as(&app, body, TIMEOUT_S, OptionSource::Chosen).await
}

/// The older route: `secure: false` disables the agent's access token. The clients of this route always send
/// `allow_internet_access: true`.
async fn create_old(State(app): State<App>, Body(body): Body<NewSandbox>) -> CreateAnswer {
    create_as(&app, body, OLD_TIMEOUT_S, OptionSource::ClientDefault).await
}

async fn create_as(
    app: &App,
    body: NewSandbox,
    default_s: u32,
    source: OptionSource,
) -> CreateAnswer {
    app.check_open()?;
    let timeout_s = timeout(app, body.timeout)?.unwrap_or(default_s);
    let on_activity_s = on_activity(body.lifecycle, app.max_timeout_s)?;
    let mut lease = lease_of(body, timeout_s, source, app.egress_config())?;
    lease.on_activity_s = on_activity_s;
    lease.template = app.pool_reference(lease.template)?;
    if let Some(network) = &mut lease.network {
        network::check_secrets(network, app.egress_config(), &app.secrets)?;
        network::seal(network, app)?;
    }
    let starting = app.node.begin();
    let created = app.registry.create(lease).await;
    let created = created.map_err(ApiError::of_create)?;
    starting.succeeded();
    let pool::Sandbox { timeline, warm, .. } = &created.sandbox;
    app.telemetry.started(timeline, *warm);
    traces::started(&created.sandbox);
    let start = if *warm { "warm" } else { "restored" };
    let answer = wire::sandbox(app, &created);
    let headers = [
        (START, start.to_owned()),
        (timing::HEADER, timing::of(timeline)),
    ];
    Ok((StatusCode::CREATED, headers, Json(answer)))
}

/// Validates those parts of a create request that do not depend on the state of the pool.
fn lease_of(
    body: NewSandbox,
    timeout_s: u32,
    source: OptionSource,
    egress: Option<&EgressConfig>,
) -> Result<NewLease, ApiError> {
    if body.template_id.is_empty() {
        return Err(ApiError::BadRequest("templateID is empty".into()));
    }
    let auto_resume = body.auto_resume.is_some_and(|resume| resume.enabled);
    let auto_pause = body.auto_pause.unwrap_or(false);
    let on_timeout = on_timeout(auto_pause, body.auto_pause_memory, auto_resume)?;
    let is_secure = body.secure != Some(false);
    let network = body.network.unwrap_or_default();
    let allow_internet_access = network::chosen_access(body.allow_internet_access, source);
    let policy = network::grant(&network, allow_internet_access, egress)?;
    let is_public = network.allow_public_traffic != Some(false);
    if !is_public && !is_secure {
        let wrong = "network.allowPublicTraffic: false requires secure: true";
        return Err(ApiError::BadRequest(wrong.into()));
    }
    refuse_set(
        "iam: this server has no workload identities",
        body.iam.as_ref(),
    )?;
    if body.volume_mounts.is_some_and(|mounts| !mounts.is_empty()) {
        return Err(ApiError::NotImplemented(
            "volumeMounts: this server has no volumes".into(),
        ));
    }
    check_env(body.env_vars.as_ref())?;
    let drawn = |wanted| if wanted { Token::Drawn } else { Token::None };
    Ok(NewLease {
        template: body.template_id,
        timeout_s,
        on_timeout,
        auto_resume,
        envd_token: drawn(is_secure),
        traffic_token: drawn(!is_public),
        metadata: body.metadata.unwrap_or_default(),
        env_vars: body.env_vars.unwrap_or_default(),
        allow_internet_access,
        policy,
        network: Some(network).filter(|network| *network != Default::default()),
        mcp: body.mcp.filter(|mcp| !mcp.is_null()),
        on_activity_s: None,
    })
}

/// Seconds after creation during which requests extend the deadline.
fn on_activity(lifecycle: Option<NewLifecycle>, most: u32) -> Result<Option<u32>, ApiError> {
    let Some(OnActivity { max_timeout }) = lifecycle.and_then(|l| l.on_activity) else {
        return Ok(None);
    };
    match u32::try_from(max_timeout) {
        Ok(longest) if (1..=most).contains(&longest) => Ok(Some(longest)),
        Ok(_) | Err(_) => Err(ApiError::BadRequest(format!(
            "lifecycle.onActivity.maxTimeout is {max_timeout} seconds: use 1 to {most}"
        ))),
    }
}

/// The action at the sandbox's deadline.
fn on_timeout(
    auto_pause: bool,
    keep_memory: Option<bool>,
    auto_resume: bool,
) -> Result<OnTimeout, ApiError> {
    match (auto_pause, keep_memory) {
        (false, Some(false)) => Err(ApiError::BadRequest(
            "autoPauseMemory: false requires autoPause: true".into(),
        )),
        (true, Some(false)) if auto_resume => Err(ApiError::BadRequest(
            "autoPauseMemory: false excludes autoResume: requests cannot resume a sandbox without memory".into(),
        )),
        (true, Some(false)) => Ok(OnTimeout::Pause(PauseMode::FilesystemOnly)),
        (true, None | Some(true)) => Ok(OnTimeout::Pause(PauseMode::Memory)),
        (false, None | Some(true)) => Ok(OnTimeout::End),
    }
}

/// Refuses an unsupported option unless it is absent, null or empty.
fn refuse_set(what: &str, value: Option<&serde_json::Value>) -> Result<(), ApiError> {
    match value {
        None | Some(serde_json::Value::Null) => Ok(()),
        Some(serde_json::Value::Object(object)) if object.is_empty() => Ok(()),
        Some(_) => Err(ApiError::NotImplemented(what.to_owned())),
    }
}

/// Refuses names and values that are invalid in an environment. Without this check, only the guest would detect them.
fn check_env(env: Option<&BTreeMap<String, String>>) -> Result<(), ApiError> {
    for (name, value) in env.into_iter().flatten() {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let shown: String = name.chars().take(64).collect();
            let wrong = format!(
                "envVars contains {shown:?}: names must not be empty or contain = or NUL, values must not contain NUL"
            );
            return Err(ApiError::BadRequest(wrong));
        }
    }
    Ok(())
}

/// The headers contain the times of its last start or resume, if this server process performed it.
async fn detail(
    State(app): State<App>,
    Extension(granted): Extension<Granted>,
    OfSandbox(id): OfSandbox,
) -> Result<([(&'static str, String); 1], Json<SandboxDetail>), ApiError> {
    let view = app.registry.get(&id).await?;
    let phases = timing::of_start(&view.sandbox.timeline);
    let detail = wire::detail(&app, &view, granted);
    Ok(([(timing::HEADER, phases)], Json(detail)))
}

async fn kill(State(app): State<App>, OfSandbox(id): OfSandbox) -> Result<StatusCode, ApiError> {
    app.pool.kill(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The filter of a list.
struct Filter {
    metadata: BTreeMap<String, String>,
    states: Vec<SandboxState>,
    /// Inclusive, so that a client can continue from the last start time that it received.
    started_since_ns: Option<u64>,
    template: Option<String>,
}

impl Filter {
    fn of(query: &Query) -> Result<Self, ApiError> {
        let states: Result<Vec<_>, _> = query.list("state").into_iter().map(read_state).collect();
        let started_after = query.time("startedAfter")?;
        Ok(Self {
            metadata: query.metadata(),
            states: states?,
            started_since_ns: started_after.map(Timestamp::unix_ns),
            template: query.get("template").map(str::to_owned),
        })
    }

    fn shows(&self, catalog: &Catalog, view: &View) -> bool {
        let has = |(key, value): (&String, &String)| view.note.metadata.get(key) == Some(value);
        let in_state =
            self.states.is_empty() || self.states.contains(&wire::state(view.sandbox.state));
        let started_ns = Timestamp::from_unix_ms(view.note.started_at).unix_ns();
        let in_time = self
            .started_since_ns
            .is_none_or(|since| started_ns >= since);
        let of_template = self.template.as_ref().is_none_or(|wanted| {
            let names = &view.sandbox.template.names;
            let named = |name: &String| name == wanted || wire::split_tag(name).0 == wanted;
            let id = &view.sandbox.template.id;
            id == wanted || catalog.id_for_clients(id) == wanted || names.iter().any(named)
        });
        self.metadata.iter().all(has) && in_state && in_time && of_template
    }
}

fn read_state(text: &str) -> Result<SandboxState, ApiError> {
    match text {
        "running" => Ok(SandboxState::Running),
        "paused" => Ok(SandboxState::Paused),
        other => Err(ApiError::BadRequest(format!(
            "state contains {other:?}: use running or paused"
        ))),
    }
}

async fn list(
    State(app): State<App>,
    merging: Merging,
    query: Query,
) -> Result<(HeaderMap, Json<Vec<ListedSandbox>>), ApiError> {
    let filter = Filter::of(&query)?;
    let page = Page::of(&query)?;
    let mut views = app.registry.list().await?;
    let catalog = app.builds.catalog();
    views.retain(|view| filter.shows(&catalog, view));
    let running = views
        .iter()
        .filter(|view| view.sandbox.state == PoolState::Running);
    let mut headers = HeaderMap::new();
    headers.insert("x-total-running", HeaderValue::from(running.count()));
    let (views, token) = page.cut(views, position);
    put_token(&mut headers, token)?;
    merging.put(&mut headers, || views.iter().map(position).collect());
    let catalog = app.builds.catalog();
    let listed = views.iter().map(|view| wire::listed(&catalog, view));
    Ok((headers, Json(listed.collect())))
}

fn position(view: &View) -> Position {
    Position {
        at: view.note.started_at,
        id: view.sandbox.id.to_string(),
    }
}

/// The older route: all running sandboxes, latest first, without paging.
async fn list_old(
    State(app): State<App>,
    query: Query,
) -> Result<Json<Vec<ListedSandbox>>, ApiError> {
    let mut filter = Filter::of(&query)?;
    filter.states = vec![SandboxState::Running];
    let mut views = app.registry.list().await?;
    let catalog = app.builds.catalog();
    views.retain(|view| filter.shows(&catalog, view));
    views.sort_by_key(|view| std::cmp::Reverse(position(view)));
    let catalog = app.builds.catalog();
    let listed = views.iter().map(|view| wire::listed(&catalog, view));
    Ok(Json(listed.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(json: serde_json::Value, source: OptionSource) -> Result<NewLease, u16> {
        let body = serde_json::from_value(json).unwrap();
        lease_of(body, 9, source, None).map_err(|error| error.status().as_u16())
    }

    fn view(started_at: u64) -> View {
        let template = pool::TemplateInfo {
            id: "t".into(),
            names: Vec::new(),
            memory: model::Bytes::mib(256),
            vcpus: 1,
            disk: model::Bytes::mib(512),
            created_unix_s: 0,
            kind: pool::TemplateKind::Installed,
            bytes: model::Bytes(0),
            source: None,
            spawned: 0,
            warm: 0,
            vmm: None,
        };
        let sandbox = pool::Sandbox {
            id: model::SandboxId::from_random([7; 19]),
            template: template.into(),
            state: PoolState::Running,
            lifetime: pool::Lifetime::default(),
            note: "".into(),
            vsock: "".into(),
            console: "".into(),
            pid: 1,
            timeline: model::Timeline::default(),
            warm: false,
            generation: 1,
            vm_since: 0,
            claim: None,
        };
        let note = crate::registry::note::tests::note(started_at).into();
        View { sandbox, note }
    }

    #[test]
    fn by_default_a_sandbox_is_secure_has_public_ports_and_is_killed_at_its_deadline() {
        let lease = lease(
            serde_json::json!({"templateID": "base"}),
            OptionSource::Chosen,
        )
        .unwrap();
        assert_eq!(lease.envd_token, Token::Drawn);
        assert_eq!(lease.traffic_token, Token::None);
        assert_eq!(lease.on_timeout, OnTimeout::End);
        assert_eq!(lease.network, None);
        assert!(!lease.auto_resume);
    }

    #[test]
    fn the_filter_started_after_is_inclusive() {
        let view = view(1_700_000_000_123);
        let printed = serde_json::to_value(wire::listed(&Catalog::default(), &view)).unwrap();
        let shown_after = |time: &str| {
            let query = Query::parse(&format!("startedAfter={}", time.replace('+', "%2B")));
            Filter::of(&query)
                .unwrap()
                .shows(&Catalog::default(), &view)
        };
        assert!(shown_after(printed["startedAt"].as_str().unwrap()));
        assert!(shown_after("2023-11-14T22:13:20.122Z"));
        assert!(shown_after("2023-11-14T23:13:20.123+01:00"));
        assert!(!shown_after("2023-11-14T22:13:20.123000001Z"));
        assert!(!shown_after("2023-11-14T22:13:20.124Z"));
    }

    #[test]
    fn contradictory_options_are_refused() {
        let cases = [
            (serde_json::json!({"templateID": ""}), 400),
            (
                serde_json::json!({"templateID": "b", "autoPauseMemory": false}),
                400,
            ),
            (
                serde_json::json!({"templateID": "b", "autoPause": true, "autoPauseMemory": false,
                                   "autoResume": {"enabled": true}}),
                400,
            ),
            (
                serde_json::json!({"templateID": "b", "secure": false,
                                   "network": {"allowPublicTraffic": false}}),
                400,
            ),
            (
                serde_json::json!({"templateID": "b", "envVars": {"A=B": "1"}}),
                400,
            ),
            (
                serde_json::json!({"templateID": "b", "iam": {"tokens": {"a": {}}}}),
                501,
            ),
            (
                serde_json::json!({"templateID": "b", "volumeMounts": [{"name": "v"}]}),
                501,
            ),
        ];
        for (json, status) in cases {
            assert_eq!(
                lease(json.clone(), OptionSource::Chosen).unwrap_err(),
                status,
                "{json}"
            );
        }
    }

    #[test]
    fn renewal_by_activity_has_a_maximum_within_the_servers() {
        let asked = |json: serde_json::Value| {
            let body: NewSandbox = serde_json::from_value(json).unwrap();
            on_activity(body.lifecycle, 100).map_err(|why| why.status().as_u16())
        };
        let of = |max: i64| json_with(serde_json::json!({"onActivity": {"maxTimeout": max}}));
        assert_eq!(asked(of(100)), Ok(Some(100)));
        assert_eq!(asked(json_with(serde_json::json!({}))), Ok(None));
        for wrong in [0, 101, -1] {
            assert_eq!(asked(of(wrong)), Err(400), "{wrong}");
        }
    }

    fn json_with(lifecycle: serde_json::Value) -> serde_json::Value {
        serde_json::json!({"templateID": "b", "lifecycle": lifecycle})
    }

    #[test]
    fn the_lease_has_the_requested_options() {
        let json = serde_json::json!({"templateID": "b", "autoPause": true, "autoPauseMemory": false,
            "secure": true, "allow_internet_access": true, "mcp": {"a": 1}, "iam": {},
            "network": {"allowPublicTraffic": false}, "volumeMounts": []});
        let lease = lease(json, OptionSource::ClientDefault).unwrap();
        let pause = OnTimeout::Pause(PauseMode::FilesystemOnly);
        assert_eq!(lease.on_timeout, pause);
        assert_eq!(lease.traffic_token, Token::Drawn);
        assert!(lease.mcp.is_some() && lease.network.is_some());
    }
}
