//! Changes to existing sandboxes: connect, timeout, pause, resume, network.

use std::time::Duration;

use axum::{extract::State, routing::MethodFilter};
use hyper::StatusCode;
use pool::{PauseMode, SandboxState, TimeoutChange, Wake};
use rest::{
    ConnectSandbox, NetworkUpdate, PauseRequest, RefreshRequest, ResumeRequest, Sandbox,
    TimeoutRequest,
};

use super::{
    app::App,
    body::{Body, MaybeBody, OfSandbox},
    endpoint::{Access, Endpoint},
    error::ApiError,
    network,
    spread::Spread,
    timeout::{TIMEOUT_S, timeout},
    wire,
};
use crate::{agent, auth::Scope, json::Json};

const WRITE: Access = Access::Key(Scope::SandboxesWrite);
/// Time limit of the agent's health check.
const HEALTH: Duration = Duration::from_secs(2);
/// Time limit for installing a certificate authority.
const TRUST: Duration = Duration::from_secs(10);
/// Default duration of a refresh in seconds.
const REFRESH_S: u32 = 15;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (post, put) = (MethodFilter::POST, MethodFilter::PUT);
    vec![
        Spread::BySandbox.at(post, "/v2/sandboxes/{id}/connect", WRITE, connect),
        Spread::BySandbox.at(post, "/sandboxes/{id}/connect", WRITE, connect_old),
        Spread::BySandbox.at(post, "/sandboxes/{id}/timeout", WRITE, set_timeout),
        Spread::BySandbox.at(post, "/sandboxes/{id}/pause", WRITE, pause),
        Spread::BySandbox.at(post, "/sandboxes/{id}/resume", WRITE, resume),
        Spread::BySandbox.at(post, "/sandboxes/{id}/refreshes", WRITE, refresh),
        Spread::BySandbox.at(put, "/sandboxes/{id}/network", WRITE, set_network),
    ]
}

type SandboxAnswer = Result<(StatusCode, Json<Sandbox>), ApiError>;

async fn connect(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    MaybeBody(body): MaybeBody<ConnectSandbox>,
) -> SandboxAnswer {
    let timeout_s = timeout(&app, body.timeout)?.or(Some(TIMEOUT_S.min(app.max_timeout_s)));
    let wake = match body.memory {
        Some(false) => Wake::ConnectColdBoot,
        None | Some(true) => Wake::Connect,
    };
    let connected = app.registry.connect(&id, timeout_s, wake).await?;
    let status = if connected.resumed {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(wire::sandbox(&app, &connected.view))))
}

/// The older route: like [`connect`], but the timeout is required.
async fn connect_old(
    app: State<App>,
    id: OfSandbox,
    Body(body): Body<ConnectSandbox>,
) -> SandboxAnswer {
    if body.timeout.is_none() {
        return Err(ApiError::BadRequest(
            "timeout is missing: set it in seconds".into(),
        ));
    }
    connect(app, id, MaybeBody(body)).await
}

async fn set_timeout(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    Body(body): Body<TimeoutRequest>,
) -> Result<StatusCode, ApiError> {
    let timeout_s = timeout(&app, Some(body.timeout))?.unwrap_or_default();
    app.pool
        .set_timeout(&id, TimeoutChange::Replace, timeout_s)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn refresh(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    MaybeBody(body): MaybeBody<RefreshRequest>,
) -> Result<StatusCode, ApiError> {
    let timeout_s = timeout(&app, body.duration)?.unwrap_or(REFRESH_S);
    app.pool
        .set_timeout(&id, TimeoutChange::Extend, timeout_s)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn pause(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    MaybeBody(body): MaybeBody<PauseRequest>,
) -> Result<StatusCode, ApiError> {
    let mode = match body.memory {
        Some(false) => PauseMode::FilesystemOnly,
        None | Some(true) => PauseMode::Memory,
    };
    if body.require_healthy_guest == Some(true) {
        let sandbox = app.pool.get(&id).await?;
        let is_healthy = match sandbox.state {
            SandboxState::Running => agent::is_healthy(&sandbox.vsock, HEALTH).await,
            // No check: `pause` below refuses paused sandboxes.
            SandboxState::Paused(_) => true,
        };
        if !is_healthy {
            return Err(ApiError::Unresponsive(id));
        }
    }
    app.pool.pause(&id, mode).await?;
    app.cut(&id);
    Ok(StatusCode::NO_CONTENT)
}

async fn resume(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    MaybeBody(body): MaybeBody<ResumeRequest>,
) -> SandboxAnswer {
    let timeout_s = timeout(&app, body.timeout)?;
    let auto_pause = body.auto_pause;
    let wake = match body.memory {
        Some(false) => Wake::ResumeColdBoot { auto_pause },
        None | Some(true) => Wake::Resume { auto_pause },
    };
    let connected = app.registry.connect(&id, timeout_s, wake).await?;
    let answer = wire::sandbox(&app, &connected.view);
    Ok((StatusCode::CREATED, Json(answer)))
}

async fn set_network(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    MaybeBody(body): MaybeBody<NetworkUpdate>,
) -> Result<StatusCode, ApiError> {
    let allow_internet_access = body.allow_internet_access;
    let mut outbound = network::outbound(body);
    let policy = network::grant(&outbound, allow_internet_access, app.egress_config())?;
    network::check_secrets(&outbound, app.egress_config(), &app.secrets)?;
    if let (Some(egress), [_, ..]) = (&app.egress, policy.ruled.as_slice()) {
        let sandbox = app.pool.get(&id).await?;
        // Done first, because with the rules in force, requests fail without the certificate. A paused sandbox is
        // refused below.
        if sandbox.state == SandboxState::Running
            && !agent::trusts(&sandbox.vsock, &egress.ca_bundle, TRUST).await
        {
            return Err(ApiError::Untrusting(id));
        }
    }
    network::seal(&mut outbound, &app)?;
    app.registry
        .set_network(&id, outbound, allow_internet_access, policy)
        .await?;
    app.cut(&id);
    Ok(StatusCode::NO_CONTENT)
}
