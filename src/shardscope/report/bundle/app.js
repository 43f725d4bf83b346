"use strict";
const page = JSON.parse(document.getElementById("page").textContent);
document.getElementById("app").textContent = page.run.title;
