//! The web console at `/ui`, to which `/` leads: serves the files of `console/dist`, which are compiled into this program.
//!
//! The files need no key: they are the same for everyone and contain nothing from the server. The page asks for a key
//! and keeps it in the tab, split between the session's storage and the history entry. Its policy allows scripts and
//! requests of this origin only. No other page can reach it, neither in a frame nor through `window.open`, because pages
//! of sandboxes may have this origin too ([`crate::proxy::isolate`]).

use axum::{
    Router,
    extract::Path,
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::{
    Method, StatusCode, Uri,
    header::{
        CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName,
        LOCATION, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
    },
};

use super::{app::App, error::ApiError, guard};
use crate::auth::random_hex;

const PAGE: &str = include_str!(concat!(env!("OUT_DIR"), "/index.html"));
/// The other files by name, compressed with gzip. Names contain a hash of the content.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/console.rs"));
/// Placeholder in [`PAGE`] for the nonce of each response.
const NONCE: &str = "STYLE_NONCE";

const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
const PERMISSIONS_POLICY: HeaderName = HeaderName::from_static("permissions-policy");

/// Adds the routes of the console. They are not part of the API, so its document does not list them.
pub(super) fn add_to(router: Router<App>) -> Router<App> {
    router
        .route(
            "/",
            get(|| async { (StatusCode::TEMPORARY_REDIRECT, TO_CONSOLE) }),
        )
        .route("/ui", get(redirect))
        .route("/ui/", get(page))
        .route("/ui/{file}", get(file))
}

const TO_CONSOLE: [(HeaderName, &str); 1] = [(LOCATION, "/ui/")];

async fn redirect() -> impl IntoResponse {
    (StatusCode::PERMANENT_REDIRECT, TO_CONSOLE)
}

/// Headers of every response.
pub(super) const STRICT: [(HeaderName, &str); 6] = [
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
    (OPENER_POLICY, "same-origin"),
    (RESOURCE_POLICY, "same-origin"),
    (
        PERMISSIONS_POLICY,
        "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    ),
];

async fn page() -> Result<Response, ApiError> {
    let nonce = random_hex::<16>().map_err(ApiError::Random)?;
    let own = [
        (CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (CACHE_CONTROL, "no-store".to_owned()),
        (CONTENT_SECURITY_POLICY, policy(&nonce)),
    ];
    Ok((STRICT, own, PAGE.replace(NONCE, &nonce)).into_response())
}

/// Content Security Policy Level 3, with Trusted Types: no string becomes markup or a script anywhere in the page. The
/// nonce is for the theme of the terminal, a `<style>` element.
fn policy(nonce: &str) -> String {
    format!(
        "default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; style-src-attr 'none'; \
         connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
}

async fn file(Path(name): Path<String>, method: Method, uri: Uri) -> Result<Response, ApiError> {
    let kind = match name.rsplit_once('.') {
        Some((_, "js")) => "text/javascript; charset=utf-8",
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "txt")) => "text/plain; charset=utf-8",
        _ => return Err(guard::no_route(method, uri).await),
    };
    let Some((_, content)) = FILES.iter().find(|(known, _)| *known == name) else {
        return Err(guard::no_route(method, uri).await);
    };
    let own = [
        (CONTENT_TYPE, kind),
        (CONTENT_ENCODING, "gzip"),
        (CACHE_CONTROL, "public, max-age=31536000, immutable"),
    ];
    Ok((STRICT, own, *content).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maximum size of everything that a browser loads for the first page, compressed.
    const MOST_BYTES: usize = 250 * 1024;

    #[test]
    fn the_console_is_small() {
        let loaded = FILES.iter().filter(|(name, _)| *name != "manifest.json");
        let bytes: usize = loaded.map(|(_, content)| content.len()).sum();
        assert!(bytes > 10_000 && bytes < MOST_BYTES, "{bytes} bytes");
    }

    #[test]
    fn the_page_loads_only_files_that_this_program_has() {
        let named = PAGE.split('"').filter_map(|part| part.strip_prefix("/ui/"));
        let named: Vec<_> = named.collect();
        assert_eq!(named.len(), 2, "{named:?}");
        for name in named {
            assert!(FILES.iter().any(|(known, _)| *known == name), "{name}");
        }
        assert_eq!(PAGE.matches(NONCE).count(), 1);
    }

    #[tokio::test]
    async fn each_page_has_a_nonce_of_its_own_and_a_strict_policy() {
        let policy_of = |answer: &Response| {
            let policy = answer.headers()[CONTENT_SECURITY_POLICY].to_str().unwrap();
            policy.to_owned()
        };
        let first = page().await.unwrap();
        let policy = policy_of(&first);
        assert_ne!(policy, policy_of(&page().await.unwrap()));
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"));
        assert!(!policy.contains("unsafe") && !policy.contains("blob:"));
        for (name, value) in STRICT {
            assert_eq!(first.headers()[name], value);
        }
    }

    #[tokio::test]
    async fn only_scripts_styles_and_licences_are_files() {
        let get = |name: &str| {
            file(
                Path(name.to_owned()),
                Method::GET,
                Uri::from_static("/ui/x"),
            )
        };
        for name in [
            "manifest.json",
            "index.html",
            "x.js",
            "..",
            "../keys.json",
            "",
        ] {
            let refused = get(name).await.unwrap_err();
            assert!(matches!(refused, ApiError::NoRoute(_)), "{name}");
        }
        let (script, _) = FILES
            .iter()
            .find(|(name, _)| name.ends_with(".js"))
            .unwrap();
        let answer = get(script).await.unwrap();
        assert_eq!(answer.headers()[CONTENT_ENCODING], "gzip");
    }
}
