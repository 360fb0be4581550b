import signal
from http import HTTPStatus

import httpx
import pytest
from playwright.async_api import expect

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.site import Site
from tests.acceptance.targets import Gate, first, ids, message
from tests.api.issuer import AUDIENCE, ec_key, issuing
from tests.dashboard.screen import Screen
from tests.outbound.servers import LoopbackTarget, answering, listening, writing

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NOT_FOUND = b'HTTP/1.1 404 Not Found\r\nContent-Length: 21\r\n\r\n{"error":"forgotten"}'
VIEWS = ("overview", "messages", "tasks", "warnings", "dead-letters", "configuration")
HOSTILE = "<img src=x onerror=document.title='broken-in'>"


async def dead_letter_one(router: RouterProcess, target: LoopbackTarget, message_id: str) -> None:
    await router.publish([message(message_id, target)])
    await router.letters("CONFIG_ERROR")


@pytest.mark.rule("OPS-3")
async def test_the_state_the_queues_and_the_pools_are_shown(site: Site, screen: Screen) -> None:
    async with site.router() as router:
        await screen.visit(router.url)

        await screen.shows("All is well")
        await expect(screen.row("POOL-A").get_by_role("meter")).to_have_count(2)
        await expect(screen.row("orders")).to_be_visible()
        await screen.shows("live")


@pytest.mark.rule("OPS-3")
async def test_the_figures_move_without_a_reload(
    site: Site, screen: Screen, target: LoopbackTarget
) -> None:
    async with site.router() as router:
        await screen.visit(router.url)
        await screen.shows("0 since start")

        await router.publish([message(f"m{number}", target) for number in range(25)])

        await screen.shows("25 since start")
        await expect(screen.row("orders")).to_contain_text("25")


@pytest.mark.rule("OPS-3")
async def test_what_is_wrong_is_said_first(site: Site, screen: Screen) -> None:
    async with listening(answering(404)) as wrong, site.router() as router:
        await screen.visit(router.url)
        await screen.shows("All is well")

        await router.publish([message("m", wrong)])

        await screen.shows("Degraded")
        await screen.shows("every queue is below 90 % success")


@pytest.mark.rule("P3")
async def test_a_group_that_waits_is_shown_with_what_it_waits_for(
    site: Site, screen: Screen
) -> None:
    gate = Gate()
    async with listening(gate.script) as closed, site.router() as router:
        await router.publish([message(f"m{n}", closed, group="order-7") for n in range(3)])
        await screen.visit(router.url)

        await expect(screen.item("order-7")).to_contain_text("behind a delivery of its group")
        await expect(screen.item("order-7")).to_contain_text("2 in DEFAULT-POOL")
        gate.open()
        await screen.shows("No group waits.")


@pytest.mark.rule("TRK-1")
async def test_a_message_in_flight_is_found_by_its_id_or_a_part_of_it(
    site: Site, screen: Screen
) -> None:
    gate = Gate()
    async with listening(gate.script) as closed, site.router() as router:
        await router.publish(
            [message(f"order-{n}", closed, group=f"g{n}") for n in range(100, 105)]
        )
        await screen.visit(router.url, "messages")
        await expect(screen.row("order-")).to_have_count(5)

        await screen.page.get_by_label("Message id").fill("R-103")
        await expect(screen.row("order-")).to_have_count(1)
        await screen.page.get_by_label("Message id").fill("order-101")
        await expect(screen.row("order-101")).to_contain_text("delivering")
        await screen.page.get_by_label("Message id").fill("nowhere")
        await screen.shows("No message in flight fits.")
        gate.open()


@pytest.mark.rule("P3")
async def test_why_a_message_is_not_delivered_yet_is_one_press_away(
    site: Site, screen: Screen
) -> None:
    gate = Gate()
    async with listening(gate.script) as closed, site.router() as router:
        await router.publish(
            [message("head", closed, group="g"), message("tail", closed, group="g")]
        )
        await screen.visit(router.url, "messages")

        await screen.button("Why is tail not delivered yet?").click()

        await expect(screen.dialog()).to_contain_text("head")
        await screen.page.keyboard.press("Escape")
        await expect(screen.dialog()).to_have_count(0)
        await expect(screen.button("Why is tail not delivered yet?")).to_be_focused()
        gate.open()


@pytest.mark.rule("CMD-2")
async def test_a_message_that_ended_is_looked_up_with_its_result_and_no_secret(
    site: Site, screen: Screen
) -> None:
    result = b'{"ack":true,"result":{"total":3,"note":"' + HOSTILE.encode() + b'"}}'
    async with listening(answering(200, result)) as target, site.router() as router:
        asked = {**message("order/1", target), "payload": {"card": "hidden"}, "authToken": "hidden"}
        await router.publish([asked])
        await screen.visit(router.url, "messages")
        await screen.shows("Nothing is in flight.")

        await screen.page.get_by_label("Message id").fill("order/1")
        await screen.button("Look up this message").click()

        await expect(screen.dialog()).to_contain_text("SUCCEEDED")
        await expect(screen.dialog()).to_contain_text('"total": 3')
        await expect(screen.dialog()).to_contain_text("17 bytes")
        await expect(screen.dialog()).not_to_contain_text("hidden")
        assert await screen.page.locator("img[src=x]").count() == 0


@pytest.mark.rule("CMD-2")
async def test_a_message_that_failed_is_looked_up_with_its_error(
    site: Site, screen: Screen
) -> None:
    async with listening(answering(404)) as wrong, site.router() as router:
        await dead_letter_one(router, wrong, "lost")
        await screen.visit(router.url, "messages")

        await screen.page.get_by_label("Message id").fill("lost")
        await screen.page.keyboard.press("Enter")

        await expect(screen.dialog()).to_contain_text("FAILED")
        await expect(screen.dialog()).to_contain_text("HTTP_404")
        await screen.page.keyboard.press("Escape")
        screen.foreseen.append("404 (Not Found)")
        await screen.page.get_by_label("Message id").fill("never seen")
        await screen.page.keyboard.press("Enter")
        await screen.shows("nothing is known of it")


@pytest.mark.rule("CMD-2")
async def test_the_details_of_a_message_in_flight_are_one_press_away(
    site: Site, screen: Screen
) -> None:
    gate = Gate()
    async with listening(gate.script) as closed, site.router() as router:
        await router.publish([message("head", closed)])
        await screen.visit(router.url, "messages")

        await screen.button("Details of head").click()

        await expect(screen.dialog()).to_contain_text("IN_FLIGHT")
        gate.open()


@pytest.mark.rule("CMD-2")
async def test_the_messages_of_a_queue_are_found_by_their_state_and_group(
    site: Site, screen: Screen
) -> None:
    async with listening(answering(404)) as wrong, site.router() as router:
        await dead_letter_one(router, wrong, "lost")
        later = [message(f"m{n:02}", wrong, group="order-7") for n in range(60)]
        await router.publish([{**each, "delaySeconds": 3600} for each in later])
        await screen.visit(router.url, "messages")
        await screen.shows("Nothing is in flight.")

        await screen.button("Find").click()
        await expect(screen.row("scheduled")).to_have_count(50)
        await screen.button("Show more").click()
        await expect(screen.row("scheduled")).to_have_count(60)
        await screen.page.get_by_label("State").select_option("FAILED")
        await screen.button("Find").click()
        await expect(screen.row("lost")).to_contain_text("HTTP_404")
        await expect(screen.row("scheduled")).to_have_count(0)
        await screen.page.get_by_label("Of group").fill("order-7")
        await screen.button("Find").click()
        await screen.shows("No message of the queue fits.")
        await screen.page.get_by_label("State").select_option("")
        await screen.button("Find").click()
        await screen.button("Details of m59").click()

        await expect(screen.dialog()).to_contain_text("order-7")


@pytest.mark.rule("CMD-10")
async def test_schedules_are_shown_with_their_next_run(
    site: Site, screen: Screen, target: LoopbackTarget
) -> None:
    nightly = {"name": "nightly", "cron": "30 2 * * *", "timezone": "Europe/Berlin"}
    often = {"name": "often", "everySeconds": 2}
    shared = {"queue": "orders", "message": {"mediationTarget": target.url, "authToken": "hidden"}}
    site.configure(schedules=[{**nightly, **shared}, {**often, **shared}])
    async with site.router() as router:
        await screen.visit(router.url, "tasks")

        await expect(screen.row("nightly")).to_contain_text("30 2 * * *")
        await expect(screen.row("nightly")).to_contain_text("Europe/Berlin")
        await expect(screen.row("nightly")).to_contain_text("in ")
        await expect(screen.row("often")).to_contain_text("every 2 s")
        await eventually(lambda: any(each.startswith("often-") for each in ids(target)))
        await expect(screen.row("often")).to_contain_text("ago")
        await screen.hides("hidden")


@pytest.mark.rule("CMD-4")
async def test_a_batch_is_watched_until_it_is_complete(
    site: Site, screen: Screen, target: LoopbackTarget
) -> None:
    gate = Gate()
    async with listening(gate.script) as closed, site.router() as router:
        batch = {
            "id": "import/7",
            "size": 3,
            "messages": [message("a", target), message("b", closed)],
            "callback": {"mediationTarget": target.url},
        }
        assert (await router.post("/batches", batch)).status_code == 202
        await screen.visit(router.url, "tasks")

        await screen.page.get_by_label("Batch id").fill("import/7")
        await screen.page.keyboard.press("Enter")

        await expect(screen.item("import/7")).to_contain_text("open")
        await expect(screen.item("import/7")).to_contain_text("2 of 3 published")
        await expect(screen.item("import/7")).to_contain_text("1 succeeded")
        await router.post("/batches/import%2F7/messages", [message("c", target)])
        gate.open()
        await expect(screen.item("import/7")).to_contain_text("complete")
        await expect(screen.item("import/7")).to_contain_text("callback published")
        screen.foreseen.append("404 (Not Found)")
        await screen.page.get_by_label("Batch id").fill("nowhere")
        await screen.page.keyboard.press("Enter")
        await screen.shows("there is no such batch")


@pytest.mark.rule("OPS-2")
async def test_a_warning_is_acknowledged(
    site: Site, screen: Screen, target: LoopbackTarget
) -> None:
    async with site.router() as router:
        await router.publish([message("m", target, pool="NOWHERE")])
        await screen.visit(router.url, "warnings")
        await screen.shows("1 to look at")

        await screen.button("Acknowledge ROUTING").click()

        await screen.shows("0 to look at")
        assert [each["acknowledged"] for each in await router.warnings("ROUTING")] == [True]


@pytest.mark.rule("DLQ-2")
async def test_a_dead_letter_is_replayed_once_confirmed(site: Site, screen: Screen) -> None:
    async with listening(first(writing(NOT_FOUND))) as target, site.router() as router:
        await dead_letter_one(router, target, "lost")
        await screen.visit(router.url, "dead-letters")
        await expect(screen.item("lost")).to_contain_text("forgotten")

        await screen.button("Replay lost").click()
        await screen.dialog().get_by_role("button", name="Replay").click()

        await screen.shows("it is back in its queue")
        await eventually(lambda: ids(target) == ["lost", "lost"])
        await expect(screen.item("lost")).to_contain_text("replayed")


@pytest.mark.rule("DLQ-2")
async def test_a_dead_letter_is_discarded_once_confirmed_and_not_before(
    site: Site, screen: Screen
) -> None:
    async with listening(answering(404)) as target, site.router() as router:
        await dead_letter_one(router, target, "lost")
        await screen.visit(router.url, "dead-letters")

        await screen.button("Discard lost").click()
        await screen.dialog().get_by_role("button", name="Cancel").click()
        await expect(screen.item("lost")).to_be_visible()
        await screen.button("Discard lost").click()
        await screen.dialog().get_by_role("button", name="Discard").click()

        await screen.shows("None: everything was accepted.")


@pytest.mark.rule("DLQ-2")
async def test_a_new_dead_letter_appears_by_itself_and_can_be_filtered(
    site: Site, screen: Screen
) -> None:
    async with listening(answering(404)) as target, site.router() as router:
        await screen.visit(router.url, "dead-letters")
        await screen.shows("None: everything was accepted.")

        await dead_letter_one(router, target, "lost")
        await expect(screen.item("lost")).to_be_visible()
        await screen.page.get_by_label("Reason").select_option("MALFORMED")

        await screen.shows("None for this reason.")


@pytest.mark.rule("ORD-11", "ORD-14")
async def test_a_held_group_is_released_or_its_letter_discarded_once_confirmed(
    site: Site, screen: Screen
) -> None:
    strict = {**site.queue("orders"), "ordering": "strict", "onDeadLetter": "hold"}
    site.configure_queues([strict], [{"code": "DEFAULT-POOL", "concurrency": 4}])
    async with listening(answering(404)) as target, site.router() as router:
        await screen.visit(router.url, "dead-letters")
        await screen.shows("None: everything was accepted.")
        await screen.hides("Held groups")
        await router.publish([message(each, target, group="order-7") for each in ("a", "b")])
        await expect(screen.row("order-7")).to_contain_text("a")
        await expect(screen.row("order-7")).to_contain_text("404")

        await screen.button("Release order-7").click()
        await screen.dialog().get_by_role("button", name="Cancel").click()
        assert ids(target) == ["a"]
        await screen.button("Release order-7").click()
        await screen.dialog().get_by_role("button", name="Release").click()
        await screen.shows("Released: the group goes on.")
        await expect(screen.button("Discard b, which holds order-7")).to_be_visible()
        assert ids(target) == ["a", "b"]
        await screen.button("Discard b, which holds order-7").click()
        await expect(screen.dialog()).to_contain_text("b is deleted for good")
        await screen.dialog().get_by_role("button", name="Discard").click()

        await screen.hides("Held groups")
        await expect(screen.item("order-7")).to_have_count(0)
        await expect(screen.button("Replay a")).to_be_visible()
        await expect(screen.button("Replay b")).to_have_count(0)


@pytest.mark.rule("ORD-14")
async def test_a_held_group_that_somebody_else_released_is_told_and_leaves_the_table(
    site: Site, screen: Screen
) -> None:
    strict = {**site.queue("orders"), "ordering": "strict", "onDeadLetter": "hold"}
    site.configure_queues([strict], [{"code": "DEFAULT-POOL", "concurrency": 4}])
    async with listening(answering(404)) as target, site.router() as router:
        await router.publish([message("a", target, group="order-7")])
        await screen.visit(router.url, "dead-letters")
        await screen.button("Release order-7").click()
        async with httpx.AsyncClient(base_url=router.url) as other:
            query = {"queue": "orders", "group": "order-7"}
            assert (await other.post("/groups/release", params=query)).status_code == HTTPStatus.OK
        screen.foreseen.append("409 (Conflict)")
        await screen.dialog().get_by_role("button", name="Release").click()

        await screen.shows("no dead letter holds this group")
        await screen.hides("Held groups")


@pytest.mark.rule("MED-4")
async def test_an_open_circuit_is_shown_and_can_be_closed(site: Site, screen: Screen) -> None:
    async with listening() as closed_soon:
        pass
    async with site.router() as router:
        dead = [message(f"m{n}", closed_soon, group=f"g{n}") for n in range(4)]
        await router.publish(dead)
        await screen.visit(router.url)
        origin = f"http://localhost:{closed_soon.port}"
        await expect(screen.item(origin)).to_contain_text("circuit open")
        await expect(screen.item(origin)).to_contain_text("fault: network")
        await expect(screen.item(origin)).to_contain_text("next try")

        await screen.button(f"Reset {origin}").click()

        await screen.shows(f"{origin} is reset.")


@pytest.mark.rule("GATE-1", "GATE-2")
async def test_a_silent_and_limited_target_is_shown_and_can_be_reset(
    site: Site, screen: Screen
) -> None:
    async with listening(answering(503, b"", "Retry-After: 600")) as busy, site.router() as router:
        await router.publish([message("m", busy)])
        await screen.visit(router.url)
        origin = f"http://localhost:{busy.port}"
        await expect(screen.item(origin)).to_contain_text("silent until")
        await expect(screen.item(origin)).to_contain_text("limited to 1")
        await expect(screen.item(origin)).to_contain_text("1 refused")

        await screen.button(f"Reset {origin}").click()

        await screen.shows(f"{origin} is reset.")
        await expect(screen.item(origin)).not_to_contain_text("silent until")


@pytest.mark.rule("CFG-8")
async def test_the_configuration_is_shown_and_reloaded(site: Site, screen: Screen) -> None:
    async with site.router() as router:
        await screen.visit(router.url, "configuration")
        await expect(screen.row("POOL-A")).to_contain_text("4")
        site.configure({"code": "POOL-A", "concurrency": 9})

        await screen.button("Reload now").click()

        await screen.shows("Reloaded:")
        await expect(screen.row("POOL-A")).to_contain_text("9")


@pytest.mark.rule("CFG-8")
async def test_a_reload_that_fails_says_why(site: Site, screen: Screen) -> None:
    async with site.router() as router:
        await screen.visit(router.url, "configuration")
        (site.folder / "routing.json").write_text("not JSON")

        await screen.button("Reload now").click()

        await expect(screen.page.locator(".toast")).to_contain_text("JSON")
        screen.errors.clear()  # the browser's own word on the 502


@pytest.mark.rule("CFG-1")
async def test_a_token_is_asked_for_and_kept_for_the_tab(site: Site, screen: Screen) -> None:
    site.settings |= {"MESSAGE_ROUTER_AUTH_MODE": "TOKEN", "MESSAGE_ROUTER_API_TOKEN": "t0ken"}
    async with site.starting() as router:
        await router.logs("ready")
        await screen.visit(f"http://127.0.0.1:{site.port}")
        await expect(screen.page.get_by_label("API token")).to_be_focused()

        await screen.page.get_by_label("API token").fill("wrong")
        await screen.button("Sign in").click()
        await screen.shows("That was not accepted.")
        await screen.page.get_by_label("API token").fill("t0ken")
        await screen.button("Sign in").click()
        await screen.shows("All is well")
        await screen.page.reload()
        await screen.shows("All is well")
        await screen.button("Sign out").click()

        await expect(screen.page.get_by_label("API token")).to_be_visible()


@pytest.mark.rule("CFG-1")
async def test_a_user_and_a_password_are_asked_for(site: Site, screen: Screen) -> None:
    site.settings |= {
        "MESSAGE_ROUTER_AUTH_MODE": "BASIC",
        "AUTH_BASIC_USERNAME": "ann",
        "AUTH_BASIC_PASSWORD": "pass:wörd",
    }
    async with site.starting() as router:
        await router.logs("ready")
        await screen.visit(f"http://127.0.0.1:{site.port}")

        await screen.page.get_by_label("User").fill("ann")
        await screen.page.get_by_label("Password").fill("pass:wörd")
        await screen.button("Sign in").click()

        await screen.shows("All is well")


@pytest.mark.rule("CFG-1")
async def test_a_token_of_the_identity_provider_is_asked_for(site: Site, screen: Screen) -> None:
    async with issuing(ec_key().published()) as issuer:
        site.settings |= {
            "MESSAGE_ROUTER_AUTH_MODE": "OIDC",
            "OIDC_ISSUER": issuer.url,
            "OIDC_AUDIENCE": AUDIENCE,
        }
        async with site.starting() as router:
            await router.logs("ready")
            await screen.visit(f"http://127.0.0.1:{site.port}")

            await screen.page.get_by_label("identity provider").fill(issuer.token(ec_key()))
            await screen.button("Sign in").click()

            await screen.shows("All is well")


@pytest.mark.rule("P5")
async def test_a_router_that_goes_away_is_told_and_comes_back_by_itself(
    site: Site, screen: Screen
) -> None:
    async with site.router() as router:
        await screen.visit(router.url)
        await screen.shows("All is well")
        await router.stop()
        await expect(screen.page.get_by_role("alert")).to_contain_text("does not answer")
        await screen.shows("offline")
    async with site.router():
        await screen.hides("does not answer")
        await screen.shows("live")


@pytest.mark.rule("P5")
async def test_a_router_that_falls_silent_is_told_too(site: Site, screen: Screen) -> None:
    async with site.router() as router:
        await screen.visit(router.url)
        await screen.shows("live")

        router.send(signal.SIGSTOP)
        await expect(screen.page.get_by_role("alert")).to_contain_text("does not answer")
        router.send(signal.SIGCONT)

        await screen.hides("does not answer")


@pytest.mark.rule("P5")
async def test_what_comes_from_outside_is_text_and_never_markup(site: Site, screen: Screen) -> None:
    gate = Gate()
    reply = HOSTILE.encode()
    async with (
        listening(gate.script) as closed,
        listening(answering(404, reply)) as wrong,
        site.router() as router,
    ):
        await dead_letter_one(router, wrong, f"dead {HOSTILE}")
        odd = message(f"id {HOSTILE}", closed, group=f"group {HOSTILE}", pool=f"pool {HOSTILE}")
        await router.publish([odd, {**odd, "id": "behind"}])
        for view in VIEWS:
            await screen.visit(router.url, view)
            quiet = {"configuration": "POOL-A", "tasks": "The configuration has no schedules."}
            await screen.shows(quiet.get(view, "onerror"))

        assert await screen.page.locator("img[src=x]").count() == 0
        assert "broken" not in await screen.page.title()
        gate.open()


@pytest.mark.rule("P5")
async def test_nothing_is_asked_of_anyone_but_the_router(site: Site, screen: Screen) -> None:
    async with site.router() as router:
        for view in VIEWS:
            await screen.visit(router.url, view)
            await screen.shows("live")

    assert screen.hosts == {f"127.0.0.1:{site.port}"}


@pytest.mark.rule("OPS-3")
@pytest.mark.parametrize("view", VIEWS)
async def test_a_phone_is_wide_enough(
    site: Site, screen: Screen, target: LoopbackTarget, view: str
) -> None:
    await screen.page.set_viewport_size({"width": 390, "height": 844})
    async with listening(answering(404)) as wrong, site.router() as router:
        await dead_letter_one(router, wrong, "a-message-with-a-rather-long-id-" + 40 * "x")
        await router.publish(
            [message("m", target, pool="A-POOL-WITH-A-RATHER-LONG-NAME" + 40 * "X")]
        )
        await screen.visit(router.url, view)
        await screen.shows("live")

        width = await screen.page.evaluate("document.documentElement.scrollWidth")

    assert width <= 390


@pytest.mark.rule("OPS-3")
async def test_everything_can_be_reached_by_keyboard(site: Site, screen: Screen) -> None:
    async with site.router() as router:
        await screen.visit(router.url)
        await screen.shows("live")

        await screen.page.keyboard.press("Tab")
        await expect(screen.page.get_by_role("link", name="To the content")).to_be_focused()
        await screen.page.keyboard.press("Enter")
        await expect(screen.page.get_by_role("main")).to_be_focused()
        await screen.page.get_by_role("link", name="Warnings").focus()
        await screen.page.keyboard.press("Enter")

        await screen.shows("No warnings. Enjoy the quiet.")
        link = screen.page.get_by_role("link", name="Warnings")
        await expect(link).to_have_attribute("aria-current", "page")


@pytest.mark.rule("OPS-3")
async def test_the_theme_follows_the_system_until_it_is_chosen(site: Site, screen: Screen) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    async with site.router() as router:
        await screen.page.emulate_media(color_scheme="dark")
        await screen.visit(router.url)
        await screen.shows("live")
        dark = await screen.page.evaluate(background)

        await screen.button("Theme: auto").click()
        await expect(screen.button("Theme: light")).to_be_visible()
        light = await screen.page.evaluate(background)
        await screen.page.reload()
        await expect(screen.button("Theme: light")).to_be_visible()

    assert (dark, light) == ("rgb(14, 17, 22)", "rgb(244, 245, 248)")


@pytest.mark.rule("P4")
async def test_who_looks_elsewhere_costs_nothing(site: Site, screen: Screen) -> None:
    async with site.router() as router:
        await screen.visit(router.url)
        await screen.shows("live")
        streams = "performance.getEntriesByName(location.origin + '/events').length"

        await screen.page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        await screen.page.wait_for_function(f"{streams} === 1")  # it has ended
        await screen.page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: false});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

        await screen.shows("live")
