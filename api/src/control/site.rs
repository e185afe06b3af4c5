//! The documents at `/docs`: serves the files of the directory `docs` beside the programs, which `cargo xtask site` writes
//! and the package contains. They need no key and run no script that is not a file of theirs.

use std::path::{Component, Path, PathBuf};

use axum::{
    Router, extract,
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::{
    StatusCode,
    header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION},
};

use super::{app::App, console::STRICT, error::ApiError};

/// Endings of the site's files, and their types.
const TYPES: [(&str, &str); 9] = [
    ("html", "text/html; charset=utf-8"),
    ("js", "text/javascript; charset=utf-8"),
    ("css", "text/css; charset=utf-8"),
    ("md", "text/markdown; charset=utf-8"),
    ("txt", "text/plain; charset=utf-8"),
    ("svg", "image/svg+xml"),
    ("png", "image/png"),
    ("woff2", "font/woff2"),
    ("ico", "image/x-icon"),
];
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
                      font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Adds the routes of the documents. Like the console's, they are not part of the API.
pub(super) fn add_to(router: Router<App>) -> Router<App> {
    router
        .route("/docs", get(redirect))
        .route("/docs/", get(|| serve(String::new())))
        .route(
            "/docs/{*file}",
            get(|extract::Path(file): extract::Path<String>| serve(file)),
        )
}

async fn redirect() -> impl IntoResponse {
    (StatusCode::PERMANENT_REDIRECT, [(LOCATION, "/docs/")])
}

async fn serve(file: String) -> Result<Response, ApiError> {
    let program = std::env::current_exe().unwrap_or_default();
    let site = program.parent().and_then(Path::parent);
    let site = site.unwrap_or(Path::new("/")).join("docs");
    answer(&site, &file).await
}

async fn answer(site: &Path, file: &str) -> Result<Response, ApiError> {
    let missing = || ApiError::NoRoute(format!("GET /docs/{file}"));
    let (path, kind) = locate(site, file).ok_or_else(missing)?;
    match tokio::fs::read(&path).await {
        Ok(content) => {
            let own = [(CONTENT_TYPE, kind), (CONTENT_SECURITY_POLICY, POLICY)];
            Ok((STRICT, own, content).into_response())
        }
        Err(_) if !site.is_dir() => {
            let cure = "This server has no documents: the package contains them, and in a checkout, \
                        `cargo xtask site` makes them.\n";
            Ok((StatusCode::NOT_FOUND, STRICT, cure).into_response())
        }
        Err(_) => Err(missing()),
    }
}

/// The path of a file below the site, and its type. `None`: no file of the site has such a name.
fn locate(site: &Path, file: &str) -> Option<(PathBuf, &'static str)> {
    let file = match file {
        "" => "index.html".to_owned(),
        _ if file.ends_with('/') => format!("{file}index.html"),
        _ => file.to_owned(),
    };
    let path = Path::new(&file);
    let is_below = path
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    let ending = path.extension()?.to_str()?;
    let (_, kind) = TYPES.iter().find(|(known, _)| *known == ending)?;
    is_below.then(|| (site.join(path), *kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_files_below_the_site_are_served() {
        let dir = tempfile::tempdir().unwrap();
        let site = dir.path().join("docs");
        std::fs::create_dir_all(site.join("use")).unwrap();
        std::fs::write(site.join("use/index.html"), "page").unwrap();
        std::fs::write(site.join("stage.json"), "{}").unwrap();
        std::fs::write(dir.path().join("secret.txt"), "secret").unwrap();
        for found in ["use/", "use/index.html"] {
            let answer = answer(&site, found).await.unwrap();
            assert_eq!(answer.headers()[CONTENT_TYPE], "text/html; charset=utf-8");
            assert_eq!(answer.headers()[CONTENT_SECURITY_POLICY], POLICY);
        }
        let outside = dir.path().join("secret.txt");
        for refused in [
            "../secret.txt",
            outside.to_str().unwrap(),
            "use/../../secret.txt",
            "stage.json",
            "use",
            "",
        ] {
            let refused = answer(&site, refused).await.unwrap_err();
            assert!(matches!(refused, ApiError::NoRoute(_)));
        }
    }

    #[tokio::test]
    async fn a_server_without_documents_says_how_to_get_them() {
        let refused = answer(Path::new("/nonexistent"), "").await.unwrap();
        assert_eq!(refused.status(), StatusCode::NOT_FOUND);
        let body = axum::body::to_bytes(refused.into_body(), 1000)
            .await
            .unwrap();
        assert!(body.ends_with(b"`cargo xtask site` makes them.\n"));
    }
}
