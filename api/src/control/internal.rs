//! Node-to-node API. Served on the cluster listener only, authenticated by mTLS instead of API keys, and not part of
//! the OpenAPI document.
//!
//! | request | caller | response |
//! |---|---|---|
//! | `GET /cluster/state` | a member | figures, sandboxes, hashes of keys, digest of the secrets |
//! | `POST /cluster/secrets` | a member | secrets and deletions that the caller lacks, with values |
//! | `PUT /cluster/secrets` | a member | empty, once the secrets are on disk; 409 if not all of them are accepted |
//! | `POST /cluster/signed` | a member | the sandbox whose token signed a file URL |
//! | `POST /cluster/template` | a member | whether this node serves requests for a template |
//! | `POST /cluster/templates` | a member | built templates and deletions, if they have changed |
//! | `POST /cluster/template/tags` | a member | whether this node sees the tags that the caller has published |
//! | `POST /cluster/template/offer` | a member | the files of a build and its result |
//! | `GET /cluster/files/KEY` | the target of an offer | hashes of its files; builds are offered to all members |
//! | `GET /cluster/files/KEY/FILE/N` | the target of an offer | a chunk of a file |
//! | `POST /cluster/moves/can` | a member | why a sandbox cannot move here, `null` if it can |
//! | `POST /cluster/moves` | a member | whether this node owns the offered sandbox now; it fetches the files first |
//! | `POST /cluster/moves/holding` | a member | whether this node has an offered sandbox |
//! | `POST /cluster/renew` | a member | a new certificate for its name |
//! | `POST /cluster/remove` | a member | the result of removing a member; served by the node that has the authority's key |
//! | `POST /cluster/join` | a host with a token | a certificate, and the settings of the cluster |

use std::sync::Arc;

use axum::{
    Extension, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use builds::run::Executor;
use cluster::{ClusterError, Holding, NodeId};
use envd::Timestamp;
use hyper::StatusCode;
use model::{SandboxId, clock::unix_ms};
use pool::GivesBase;
use rest::{LostSandbox, RestError};

use super::{app::App, error::ApiError, nodes, wire};
use crate::{
    json::Json,
    peers::{
        MAX_ANSWER, Peer, PeerState, Peers,
        authority::AuthorityError,
        join::{Join, JoinError, Renew, Signed, sign_join, sign_renewal, take_token},
        merge_secrets,
        moves::{Asked, MoveError, Moves, Offer},
        registrar, templates,
        wire::{JOIN, Removal, SignedUrl, TemplateName},
    },
    secrets::merge::{Batch, Stamps},
};

/// Maximum size of a request body.
const MAX_BODY: usize = 64 << 10;

#[derive(Clone)]
struct Internal {
    app: App,
    peers: Peers,
    moves: Moves,
    executor: Executor,
}

/// Builds the router. Except for [`JOIN`], callers must pass requests of members only.
pub(crate) fn router(app: App, peers: Peers, moves: Moves, executor: Executor) -> Router {
    let secrets = post(newer_secrets).put(put_secrets);
    let secrets = secrets.layer(DefaultBodyLimit::max(MAX_ANSWER));
    Router::new()
        .route("/cluster/state", get(state))
        .route("/cluster/secrets", secrets)
        .route("/cluster/signed", post(signed))
        .route("/cluster/template", post(template))
        .route("/cluster/templates", post(templates))
        .route("/cluster/template/tags", post(tags))
        .route("/cluster/template/offer", post(offer))
        .route("/cluster/files/{key}", get(files))
        .route("/cluster/files/{key}/{file}/{chunk}", get(chunk))
        .route("/cluster/moves/can", post(can_move))
        .route("/cluster/moves", post(take))
        .route("/cluster/moves/holding", post(holding))
        .route("/cluster/renew", post(renew))
        .route("/cluster/remove", post(remove))
        .route(JOIN, post(join))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Internal {
            app,
            peers,
            moves,
            executor,
        })
}

async fn state(State(internal): State<Internal>) -> Result<Json<PeerState>, ApiError> {
    let app = &internal.app;
    let views = app.registry.list().await?;
    let now = Timestamp::from_unix_ms(unix_ms());
    let catalog = app.builds.catalog();
    let sandboxes = views.iter().map(|view| LostSandbox {
        sandbox_id: view.sandbox.id.to_string(),
        template_id: catalog.id_for_clients(&view.sandbox.template.id).to_owned(),
        state: wire::state(view.sandbox.state),
        started_at: Timestamp::from_unix_ms(view.note.started_at),
        seen_at: now,
    });
    Ok(Json(PeerState {
        sandboxes: sandboxes.collect(),
        node: nodes::own(app).await?,
        keys: app.authenticator.own_keys(),
        secrets: Some(app.secrets.digest()),
    }))
}

async fn newer_secrets(State(internal): State<Internal>, Json(known): Json<Stamps>) -> Json<Batch> {
    Json(internal.app.secrets.newer_than(&known))
}

async fn put_secrets(State(internal): State<Internal>, body: Bytes) -> StatusCode {
    let Ok(batch) = Batch::parse(&body) else {
        return StatusCode::BAD_REQUEST;
    };
    match merge_secrets(&internal.app.secrets, batch).await {
        Ok(0) => StatusCode::NO_CONTENT,
        Ok(_) => StatusCode::CONFLICT,
        Err(why) => {
            tracing::error!(why = %model::chain(&why), "cannot store secrets received from another node");
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

async fn signed(
    State(internal): State<Internal>,
    Json(asked): Json<SignedUrl>,
) -> Json<Option<SandboxId>> {
    let operation = if asked.operation == "read" {
        "read"
    } else {
        "write"
    };
    Json(
        internal
            .app
            .registry
            .find_by_signature(&asked.query, operation),
    )
}

async fn template(State(internal): State<Internal>, Json(asked): Json<TemplateName>) -> Json<bool> {
    let Internal { app, peers, .. } = &internal;
    let is_right = match app.home_elsewhere(&asked.name) {
        Some(home) => asked.is_by_copies && !peers.is_there(&home),
        None => true,
    };
    Json(is_right && app.has_template(&asked.name).await)
}

async fn templates(
    State(internal): State<Internal>,
    Json(asked): Json<templates::Asked>,
) -> Response {
    match templates::shelf(&internal.peers, &internal.app.builds, asked).await {
        Ok(page) => Json(page).into_response(),
        Err(why) => {
            tracing::error!(%why, "cannot list this node's templates for another node");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn tags(
    State(internal): State<Internal>,
    Extension(peer): Extension<Arc<Peer>>,
    Json(announced): Json<templates::Announced>,
) -> Json<bool> {
    let peers = &internal.peers;
    Json(match peers.member(&peer) {
        Some(node) => peers.sees(node, &announced).await,
        None => false,
    })
}

async fn offer(
    State(internal): State<Internal>,
    Json(wanted): Json<templates::WantedBuild>,
) -> Response {
    let Internal {
        app,
        peers,
        executor,
        ..
    } = &internal;
    match templates::offer(peers, &app.builds, executor, &wanted).await {
        Ok(Some(given)) => Json(given).into_response(),
        Ok(None) => (StatusCode::NOT_FOUND, "no such build").into_response(),
        Err(why) => {
            tracing::error!(why, "cannot offer a build to another node");
            (StatusCode::INTERNAL_SERVER_ERROR, why).into_response()
        }
    }
}

async fn files(
    State(internal): State<Internal>,
    Extension(peer): Extension<Arc<Peer>>,
    Path(key): Path<String>,
) -> Response {
    let Some(by) = internal.peers.member(&peer) else {
        return StatusCode::FORBIDDEN.into_response();
    };
    match internal.peers.offers().list(&key, by).await {
        Ok(Some(list)) => Json(list).into_response(),
        Ok(None) => StatusCode::NOT_FOUND.into_response(),
        Err(why) => unreadable(&key, &why),
    }
}

async fn chunk(
    State(internal): State<Internal>,
    Extension(peer): Extension<Arc<Peer>>,
    Path((key, file, chunk)): Path<(String, String, usize)>,
) -> Response {
    let Some(by) = internal.peers.member(&peer) else {
        return StatusCode::FORBIDDEN.into_response();
    };
    let offers = internal.peers.offers();
    match offers.chunk(&key, by, &file, chunk).await {
        Ok(Some(bytes)) => bytes.into_response(),
        Ok(None) => StatusCode::NOT_FOUND.into_response(),
        Err(why) => unreadable(&key, &why),
    }
}

fn unreadable(key: &str, why: &std::io::Error) -> Response {
    tracing::error!(key, %why, "cannot read files offered to another node");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

async fn can_move(
    State(internal): State<Internal>,
    Json(asked): Json<Asked>,
) -> Json<Option<String>> {
    match asked.needs {
        Some(needs) => {
            let gives = if asked.gives_base {
                GivesBase::Yes
            } else {
                GivesBase::No
            };
            Json(internal.moves.refuses(needs, gives).await)
        }
        None => Json(Some(
            "`needs` is missing in the body of /cluster/moves/can".to_owned(),
        )),
    }
}

async fn take(
    State(internal): State<Internal>,
    Extension(peer): Extension<Arc<Peer>>,
    Json(offer): Json<Offer>,
) -> Result<Json<Holding>, MoveError> {
    let member = internal.peers.member(&peer).cloned();
    let node = member.ok_or_else(|| {
        MoveError::Malformed("the caller is not a member of this cluster".to_owned())
    })?;
    internal.moves.taken(node, offer).await.map(Json)
}

async fn holding(
    State(internal): State<Internal>,
    Json(asked): Json<Asked>,
) -> Result<Json<Holding>, MoveError> {
    internal
        .moves
        .holding(&asked.sandbox, asked.epoch)
        .await
        .map(Json)
}

impl IntoResponse for MoveError {
    fn into_response(self) -> Response {
        let message = model::chain(&self);
        tracing::warn!(why = message, "rejected a move of a sandbox to this node");
        let status = StatusCode::CONFLICT;
        let body = RestError {
            code: status.as_u16(),
            message,
            error_code: None,
        };
        (status, Json(body)).into_response()
    }
}

async fn renew(
    State(internal): State<Internal>,
    Extension(peer): Extension<Arc<Peer>>,
    Json(asked): Json<Renew>,
) -> Result<Json<Signed>, JoinError> {
    let peers = &internal.peers;
    let node = peers.member(&peer).ok_or(JoinError::Spent)?;
    let authority = peers.authority()?;
    let view = peers.cluster().view();
    let member = view.members.get(node).ok_or(JoinError::Spent)?;
    let signed = sign_renewal(&authority, peers.dir(), member, &asked)?;
    tracing::info!(%node, "renewed the certificate of another node");
    Ok(Json(signed))
}

async fn remove(State(internal): State<Internal>, Json(node): Json<NodeId>) -> Json<Removal> {
    Json(match internal.peers.remove_here(&node).await {
        Ok(()) => Removal::Removed,
        Err(ClusterError::NotMember(_)) => Removal::NotMember,
        Err(ClusterError::NodeLives(_)) => Removal::Lives,
        Err(why) => Removal::Failed(model::chain(&why)),
    })
}

async fn join(
    State(internal): State<Internal>,
    Json(asked): Json<Join>,
) -> Result<Json<Signed>, JoinError> {
    let peers = &internal.peers;
    let authority = peers.authority()?;
    take_token(peers.dir(), &asked)?;
    let applicant = asked.applicant()?;
    let registrar = registrar(peers.dir(), peers.settings())?;
    let member = registrar.admit(&applicant).await?;
    let signed = sign_join(&authority, peers.dir(), peers.settings(), &asked, member)?;
    tracing::info!(node = %asked.node, "a node joined the cluster");
    Ok(Json(signed))
}

impl IntoResponse for JoinError {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Spent => StatusCode::FORBIDDEN,
            Self::Malformed | Self::Identity | Self::Authority(AuthorityError::Key) => {
                StatusCode::BAD_REQUEST
            }
            Self::Authority(AuthorityError::Elsewhere)
            | Self::Cluster(ClusterError::NameTaken(_) | ClusterError::Full(_)) => {
                StatusCode::CONFLICT
            }
            Self::Cluster(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Settings(_)
            | Self::Authority(AuthorityError::Settings(_) | AuthorityError::Make(_))
            | Self::Tls(_)
            | Self::Unreachable { .. }
            | Self::Refused(_)
            | Self::Boot(_)
            | Self::Random(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let body = RestError {
            code: status.as_u16(),
            message: model::chain(&self),
            error_code: None,
        };
        (status, Json(body)).into_response()
    }
}
