// What asks before it does, and what asks who you are.

import { Component } from "./preact.js";
import { Button, html } from "./parts.js";

/** A modal window: the browser keeps the focus in it and closes it on Escape. */
class Modal extends Component {
  componentDidMount() {
    this.base.showModal();
  }

  componentWillUnmount() {
    this.base.close(); // gives the focus back to where it was
  }

  render({ title, onClose, children }) {
    return html`<dialog aria-labelledby="dialog-title" onClose=${onClose}>
      <h2 id="dialog-title">${title}</h2>${children}
    </dialog>`;
  }
}

export function Dialog({ dialog, close }) {
  if (dialog === null) return null;
  const { title, text, facts, action, danger } = dialog;
  const confirm = () => {
    close();
    action.run();
  };
  return html`<${Modal} title=${title} onClose=${close}>
    ${text && html`<p class="break">${text}</p>`}
    ${facts && html`<dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`}
    <div class="buttons">
      <${Button} onClick=${close}>${action ? "Cancel" : "Close"}<//>
      ${action && html`<${Button} kind=${danger ? "danger filled" : "filled"} onClick=${confirm}>${action.name}<//>`}
    </div>
  <//>`;
}

/** In place of everything, while the router wants to know who asks. */
export class Login extends Component {
  componentDidMount() {
    this.base.querySelector("input").focus();
  }

  render({ login, act }) {
    return html`<${LoginForm} login=${login} act=${act} />`;
  }
}

function LoginForm({ login, act }) {
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    if (login.scheme === "basic") act.signInWithPassword(form.get("user"), form.get("password"));
    else act.signInWithToken(form.get("token"));
  };
  const kind = login.isOpenId ? "Token of your identity provider" : "API token";
  return html`<main class="login"><form onSubmit=${submit}>
    <img src="/static/icon.svg" alt="" width="48" height="48" />
    <h1>message-router</h1>
    ${login.wrong ? html`<p class="bad" role="alert">That was not accepted. Try again.</p>` : html`<p class="dim">Sign in to see how your messages are doing.</p>`}
    ${login.scheme === "basic"
      ? html`<label>User<input name="user" autocomplete="username" required /></label>
          <label>Password<input name="password" type="password" autocomplete="current-password" required /></label>`
      : html`<label>${kind}<input name="token" type="password" autocomplete="off" spellcheck="false" required /></label>`}
    <${Button} type="submit" kind="filled">Sign in<//>
  </form></main>`;
}
