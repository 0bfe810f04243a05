(function () {
  var tip = document.getElementById("tip");
  document.addEventListener("pointermove", function (event) {
    var text = event.target.getAttribute && event.target.getAttribute("data-t");
    tip.classList.toggle("on", Boolean(text));
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (event.clientY > innerHeight - 60 ? event.clientY - 40 : event.clientY + 18) + "px";
  });
  document.addEventListener("pointerleave", function () { tip.classList.remove("on"); });
})();
