//! Routes of E2B's API that this server does not support. Each responds with 501 and names the missing feature, so that
//! users do not conclude from a 404 that the server is outdated or its URL wrong.

use axum::routing::MethodFilter;

use super::{
    endpoint::{Access, Endpoint},
    error::ApiError,
    spread::Spread,
};
use crate::auth::Scope;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let (get, post) = (MethodFilter::GET, MethodFilter::POST);
    let delete = MethodFilter::DELETE;
    let read = Access::Key(Scope::TemplatesRead);
    let write = Access::Key(Scope::TemplatesWrite);
    let mut all = Vec::new();
    for path in ["/volumes", "/volumes/{id}"] {
        all.push(Spread::Own.at(get, path, read, volumes));
    }
    all.push(Spread::Own.at(post, "/volumes", write, volumes));
    all.push(Spread::Own.at(delete, "/volumes/{id}", write, volumes));
    all
}

async fn volumes() -> ApiError {
    ApiError::NotImplemented("volumes".into())
}
