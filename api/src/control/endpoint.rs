//! A route: its method, its path, who may use it, which node serves it, and its handler.

use axum::routing::{MethodFilter, MethodRouter, on};

pub use super::guard::Access;
use super::{app::App, spread::Spread};

#[derive(Debug)]
pub struct Endpoint {
    /// HTTP method in lower case.
    pub method: &'static str,
    /// Path with parameters in braces.
    pub path: &'static str,
    pub access: Access,
    pub(super) spread: Spread,
    pub(super) handler: MethodRouter<App>,
}

impl Spread {
    /// A route that is distributed in this way.
    pub(super) fn at<H, T>(
        self,
        filter: MethodFilter,
        path: &'static str,
        access: Access,
        handler: H,
    ) -> Endpoint
    where
        H: axum::handler::Handler<T, App>,
        T: 'static,
    {
        Endpoint {
            method: name_of(filter),
            path,
            access,
            spread: self,
            handler: on(filter, handler),
        }
    }
}

fn name_of(filter: MethodFilter) -> &'static str {
    const NAMES: [(MethodFilter, &str); 5] = [
        (MethodFilter::GET, "get"),
        (MethodFilter::POST, "post"),
        (MethodFilter::PUT, "put"),
        (MethodFilter::PATCH, "patch"),
        (MethodFilter::DELETE, "delete"),
    ];
    let found = NAMES.into_iter().find(|(known, _)| *known == filter);
    found.map_or("", |(_, name)| name)
}
