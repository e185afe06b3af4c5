use super::*;

fn id() -> SandboxId {
    SandboxId::from_random([0; 19])
}

#[test]
fn errors_have_the_statuses_that_clients_expect() {
    let full = || PoolError::Full {
        why: "memory".into(),
        retry_after: Duration::from_millis(1200),
    };
    let cases: [(ApiError, u16); 20] = [
        (PoolError::Refused(id(), Refusal::NotFound).into(), 404),
        (PoolError::Refused(id(), Refusal::AlreadyPaused).into(), 409),
        (PoolError::Draining.into(), 503),
        (RegistryError::Pool(full()).into(), 429),
        (PoolError::NoSpace("disk".into()).into(), 507),
        (PoolError::TooManySaved(7).into(), 507),
        (
            PoolError::TemplateQuota {
                taken: 1 << 30,
                need: 1,
                quota: 1 << 30,
            }
            .into(),
            507,
        ),
        (PoolError::NoTemplate("x".into()).into(), 404),
        (AuthError::Missing.into(), 401),
        (ApiError::NotImplemented("volumes".into()), 501),
        (BuildsError::NotWaiting.into(), 400),
        (BuildsError::Installed("base".into()).into(), 403),
        (BuildsError::TooMany("32".into()).into(), 429),
        (UploadError::Quota(1).into(), 507),
        (GrantError::Expired.into(), 403),
        (SecretError::Taken("a".into()).into(), 409),
        (SecretError::NotFound("a".into()).into(), 404),
        (SecretError::TooMany.into(), 507),
        (NotSettable(NodeStatus::Unhealthy).into(), 409),
        (ApiError::NodeClosed("a".into(), NodeStatus::Draining), 503),
    ];
    for (error, status) in cases {
        assert_eq!(error.status().as_u16(), status, "{error}");
        assert_eq!(error.body().code, status);
    }
    let response = ApiError::from(full()).into_response();
    assert_eq!(response.headers()[RETRY_AFTER], "2");
}

#[test]
fn errors_have_the_error_codes_of_the_specification() {
    let full = PoolError::Full {
        why: "memory".into(),
        retry_after: Duration::ZERO,
    };
    let silent = || PoolError::AgentSilent(id());
    let cases: [(ApiError, u16, Option<&str>); 11] = [
        (ApiError::Unresponsive(id()), 503, Some(UNRESPONSIVE)),
        (full.into(), 429, Some("sandbox_capacity_unavailable")),
        (
            ApiError::NodeClosed("a".into(), NodeStatus::Draining),
            503,
            Some("sandbox_capacity_unavailable"),
        ),
        (
            ApiError::of_create(RegistryError::Pool(silent())),
            503,
            Some("sandbox_create_failed"),
        ),
        (silent().into(), 503, None),
        (
            ApiError::of_create(RegistryError::Pool(PoolError::NoTemplate("x".into()))),
            404,
            None,
        ),
        (
            IdempotencyError::Mismatch.into(),
            409,
            Some("idempotency_request_mismatch"),
        ),
        (
            IdempotencyError::OutcomeUnknown.into(),
            422,
            Some("idempotency_outcome_unknown"),
        ),
        (
            SecretError::TooMany.into(),
            507,
            Some("secret_limit_reached"),
        ),
        (
            ApiError::Interrupted("x".into()),
            500,
            Some("internal_server_error"),
        ),
        (ApiError::BadRequest("x".into()), 400, None),
    ];
    for (error, status, code) in cases {
        let body = serde_json::to_value(error.body()).unwrap();
        assert_eq!(body["code"], status, "{error}");
        assert_eq!(body["error_code"].as_str(), code, "{error}");
    }
}
